"""Token classification: the named entities of a text, or a label for each of its tokens.

Equal to transformers' TokenClassificationPipeline with `aggregation_strategy`, `ignore_labels` and `stride`, with these
differences:

- An entity's text is a part of the caller's text. The pipeline returns what its tokenizer decodes ("new york" for "New
  York").
- A text that is too long is refused unless the caller requests windows or truncation. The pipeline drops its end
  silently.
- Special tokens in the text are text (see tasks/base.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    Entity,
    TokenClassificationInput,
    TokenClassificationResult,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    LocatedText,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    check_windows,
    cut_located,
    sequence,
    traits_of,
)
from neuronpipe.tasks.scores import softmax

_AGGREGATIONS = frozenset(Aggregation.values())
_TOKEN_AGGREGATIONS = frozenset((Aggregation.AGGREGATION_UNSPECIFIED, Aggregation.AGGREGATION_NONE))
_DEFAULT_IGNORED = frozenset("O")
_CUTS = frozenset((Truncation.TRUNCATION_RIGHT, Truncation.TRUNCATION_LEFT))


def check(input: TokenClassificationInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    check_truncation(input)
    if input.aggregation not in _AGGREGATIONS:
        raise InvalidInput("aggregation", f"{input.aggregation} is not known")
    if input.keep_all_labels and input.ignore_labels:
        raise InvalidInput("keep_all_labels", "cannot be combined with ignore_labels", ["ignore_labels"])
    if input.window_stride_tokens and input.truncation in _CUTS:
        problem = "cannot be combined with window_stride_tokens, which reads the whole text"
        raise InvalidInput("truncation", problem, ["window_stride_tokens"])


def encode(input: TokenClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence, or one for each window, annotated with the offsets and words of LocatedText."""
    if input.window_stride_tokens:
        parts = _windows(input, tokenizer, model)
    else:
        whole = tokenizer.locate(input.text)
        advice = ", or window_stride_tokens to read all of it"
        parts = [cut_located(whole, model, input.truncation, advice, ["window_stride_tokens"])]
    if not any(len(part.token_ids) for part in parts):  # a blank text has its special tokens, and no entities
        raise InvalidInput("text", "has no tokens")
    annotations = [{name: getattr(part, name) for name in _ANNOTATIONS} for part in parts]
    return Encoded([sequence(part, model) for part in parts], annotations, parts[0].truncated_tokens)


def decode(
    input: TokenClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> TokenClassificationResult:
    """Returns the entities from `logits`, float32 [tokens, labels]."""
    ignored = frozenset() if input.keep_all_labels else frozenset(input.ignore_labels) or _DEFAULT_IGNORED
    entities = [
        entity
        for annotation, output in zip(annotations, outputs, strict=True)
        for entity in _entities(input.aggregation, model.labels, ignored, annotation, output["logits"])
    ]
    if len(annotations) > 1:
        entities = list(_without_overlaps(entities))
    text = input.text
    return TokenClassificationResult(
        entities=[Entity(**entity._asdict(), text=text[entity.start : entity.end]) for entity in entities]
    )


def _windows(input: TokenClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> list[LocatedText]:
    room, overlap_tokens = model.max_tokens - tokenizer.special_tokens(pair=False), input.window_stride_tokens
    if overlap_tokens >= room:
        problem = f"{overlap_tokens}, must be less than {room}, the tokens of the text that fit into a window"
        raise InvalidInput("window_stride_tokens", problem)
    check_windows(
        "text", input.text, tokenizer, window_tokens=model.max_tokens, room_tokens=room, overlap_tokens=overlap_tokens
    )
    return tokenizer.locate_windows(input.text, max_tokens=model.max_tokens, overlap_tokens=overlap_tokens)


class _LabelledSpan(NamedTuple):
    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Tokens, words or entities in the order of the text: the label's number, that label's score, and the offsets."""

    label: Array
    score: Array
    start: Array
    end: Array


def _entities(
    aggregation: "Aggregation.ValueType",
    labels: Sequence[str],
    ignored: frozenset[str],
    annotation: Arrays,
    logits: Array,
) -> Iterator[_LabelledSpan]:
    is_text = annotation["char_start"] >= 0
    if not is_text.any():
        return iter(())
    scores = softmax(logits[is_text])
    start, end = annotation["char_start"][is_text], annotation["char_end"][is_text]
    if aggregation in _TOKEN_AGGREGATIONS or aggregation == Aggregation.AGGREGATION_SIMPLE:
        labelled = _best_labels(scores, start, end)
    else:
        labelled = _words(aggregation, scores, annotation["continues_word"][is_text] == 0, start, end)
    names = list(labels)
    if aggregation not in _TOKEN_AGGREGATIONS:
        labelled = _grouped(labelled, labels)
        # The pipeline also shows the part behind the hyphen of a label such as MISC-LAW.
        names = [label.split("-", 1)[-1] for label in labels]
    has_kept_label = np.array([name not in ignored for name in names], bool)[labelled.label]
    columns = (
        column[has_kept_label].tolist() for column in (labelled.label, labelled.score, labelled.start, labelled.end)
    )
    return (_LabelledSpan(names[label], score, begin, stop) for label, score, begin, stop in zip(*columns, strict=True))


def _best_labels(scores: Array, start: Array, end: Array) -> _Labelled:
    best = scores.argmax(axis=1)
    return _Labelled(best, scores[np.arange(len(best)), best], start, end)


def _words(
    aggregation: "Aggregation.ValueType", scores: Array, begins_word: Array, start: Array, end: Array
) -> _Labelled:
    begins_word[:1] = True  # a window always begins with a word
    first = np.flatnonzero(begins_word)
    if aggregation == Aggregation.AGGREGATION_FIRST:
        word_scores = scores[first]
    elif aggregation == Aggregation.AGGREGATION_AVERAGE:
        word_scores = np.add.reduceat(scores, first, axis=0) / np.diff(first, append=len(scores))[:, np.newaxis]
    else:
        # The token with the highest score of each word: sort by word, then by score; take the first token of each word.
        order = np.lexsort((-scores.max(axis=1), np.cumsum(begins_word)))
        word_scores = scores[order[first]]
    last = np.append(first[1:], len(scores)) - 1
    return _best_labels(word_scores, start[first], end[last])


def _grouped(labelled: _Labelled, labels: Sequence[str]) -> _Labelled:
    """Joins neighbours with the same label. B- and I- of a label count as the same, but B- begins a new entity."""
    if not len(labelled.label):
        return labelled
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    numbers = {tag: number for number, tag in enumerate(tags)}
    tag = np.array([numbers[name] for name in tags])[labelled.label]
    begins = np.array([label.startswith("B-") for label in labels])[labelled.label]
    begins[0] = True
    begins[1:] |= tag[1:] != tag[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(tag)) - 1
    means = np.add.reduceat(labelled.score, first) / (last - first + 1)
    return _Labelled(labelled.label[first], means, labelled.start[first], labelled.end[last])


def _without_overlaps(entities: list[_LabelledSpan]) -> Iterator[_LabelledSpan]:
    """Removes overlapping entities of several windows: the longest stays, the most probable if lengths are equal."""
    best: _LabelledSpan | None = None
    for entity in sorted(entities, key=lambda entity: entity.start):
        if best is None or not best.start <= entity.start < best.end:
            if best is not None:
                yield best
            best = entity
        elif (entity.end - entity.start, entity.score) > (best.end - best.start, best.score):
            best = entity
    if best is not None:
        yield best


traits = traits_of("text", "window_stride_tokens", "truncation")
# Entities are parts of the text, so decode reads all of the input.
_ANNOTATIONS = {"char_start": "tokens", "char_end": "tokens", "continues_word": "tokens"}
TASK = Task("token_classification", check, traits, encode, decode, None, annotations=Annotations(_ANNOTATIONS))
