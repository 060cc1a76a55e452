"""Zero-shot token classification: the entities of a text for the labels of the request (GLiNER).

The labels and the words of the text are one sequence. A model of spans scores spans of words for each label. A model of
tokens scores each word as the start, the end and the inside of an entity of each label. Equal to
`GLiNER.predict_entities` of gliner 0.2 with `threshold`, `flat_ner` and `multi_label`. Differences:

- A text that is too long is refused unless the caller requests truncation. The package drops its end with a warning.
- Special tokens in labels are text (see tasks/base.py).
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import (
    Entity,
    Truncation,
    ZeroShotTokenClassificationInput,
    ZeroShotTokenClassificationResult,
)
from neuronpipe.core.errors import CUT, InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    Task,
    TextTokenizer,
    TokenIds,
    check_text,
    check_truncation,
    or_default,
    side_of,
    too_many_tokens,
    traits_of,
)
from neuronpipe.tasks.many_texts import check_texts
from neuronpipe.tasks.scores import sigmoid

# An input of the model, int32 [tokens]: n for the first token of the nth word, -n for the token of the nth label.
WORD_NUMBER = "word_number"
# The size of an axis of the model's output. Models are trained with 25 labels in a text, or up to 100.
MAX_LABELS = 64
_DEFAULT_THRESHOLD = 0.5
# Spans that reach the threshold in a model of tokens: a model of 12 words, 384 words and 64 labels has at most 294,912.
_MAX_SPANS = 300_000
# Source: gliner 0.2, data_processing/tokenizer.py, WhitespaceTokenSplitter.
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


class GlinerFacts(TaskFacts):
    """Facts about a GLiNER."""

    encoded = ("label_token_id", "separator_token_id", "before", "behind", "max_words")

    label_token_id: int = Field(ge=0, description="the token before each label, whose vector describes the label")
    separator_token_id: int = Field(ge=0, description="the token between the labels and the text")
    before: tuple[int, ...] = Field(description="special tokens before the labels")
    behind: tuple[int, ...] = Field(description="special tokens behind the text")
    max_width: int = Field(
        ge=0, description="the words of the longest entity; 0 for a model of tokens, without a limit"
    )
    max_words: int = Field(ge=1, description="the words of the longest text")


def check(input: ZeroShotTokenClassificationInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    check_texts("candidate_labels", input.candidate_labels)
    if (labels := len(set(input.candidate_labels))) > MAX_LABELS:
        raise InvalidInput("candidate_labels", f"{labels} labels, the limit is {MAX_LABELS}; send several inputs")
    if not 0 <= input.threshold < 1:  # also false for NaN
        raise InvalidInput("threshold", f"{input.threshold:g}, must be less than 1, and not negative")
    check_truncation(input)


def encode(input: ZeroShotTokenClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Encodes the labels and the words as one sequence, annotated with the offsets of each word."""
    labels, places = _labels(input), [*split(input.text)]
    if not places:
        raise InvalidInput("text", "has no words")
    facts = GlinerFacts.of(model)
    token_ids, words = tokenizer.encode_words([*labels, *(place[0] for place in places)])
    of_text = words >= len(labels)
    prompt_tokens = len(labels) + 1 + len(facts.before) + len(facts.behind) + int(np.count_nonzero(~of_text))
    room = model.max_tokens - prompt_tokens
    if room < 1:
        problem = f"{prompt_tokens} tokens leave no room for the text, the model takes {model.token_limit}"
        raise InvalidInput("candidate_labels", problem)
    text_ids, text_words = token_ids[of_text], words[of_text] - len(labels)
    first, end = _kept(text_words, len(places), room, facts.max_words, is_left=side_of(input.truncation) == "left")
    if end - first < len(text_ids) and or_default(input.truncation) == Truncation.TRUNCATION_ERROR:
        if len(text_ids) > room:
            raise too_many_tokens("text and candidate_labels", len(text_ids) + prompt_tokens, model)
        problem = f"{len(places)} words, the model takes {facts.max_words}; {CUT}"
        raise InvalidInput("text", problem, ("truncation",))
    if first == end:
        raise InvalidInput("text", "has no tokens")
    ids, numbers = number_words(
        facts,
        len(labels),
        np.concatenate([token_ids[~of_text], text_ids[first:end]]),
        np.concatenate([words[~of_text], text_words[first:end] - text_words[first] + len(labels)]),
    )
    kept_places = places[text_words[first] : text_words[end - 1] + 1]
    annotations = {
        "char_start": np.array([place.start() for place in kept_places], np.int32),
        "char_end": np.array([place.end() for place in kept_places], np.int32),
    }
    return Encoded([{"input_ids": ids, WORD_NUMBER: numbers}], [annotations], len(text_ids) - (end - first))


def split(text: str) -> Iterator[re.Match[str]]:
    """Yields the words of a text, and each of its other characters that is no space."""
    return _WORD.finditer(text)


def number_words(facts: GlinerFacts, labels: int, token_ids: TokenIds, words: TokenIds) -> tuple[TokenIds, TokenIds]:
    """Joins labels and words to one sequence, with its WORD_NUMBER.

    `words`: for each token, its label or word, from 0 on.
    """
    is_first = np.append(True, words[1:] != words[:-1])
    begins = np.searchsorted(words, np.arange(labels))
    text_begin = int(np.searchsorted(words, labels))
    numbers = np.where(is_first & (words >= labels), words - labels + 1, 0)
    ids = np.insert(token_ids, [*begins, text_begin], [*[facts.label_token_id] * labels, facts.separator_token_id])
    numbers = np.insert(numbers, [*begins, text_begin], [*range(-1, -labels - 1, -1), 0])
    ends = len(facts.before), len(facts.behind)
    return np.concatenate([facts.before, ids, facts.behind]).astype(np.int32), np.pad(numbers, ends).astype(np.int32)


def decode(
    input: ZeroShotTokenClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ZeroShotTokenClassificationResult:
    """Finds the entities from `logits`, float32 [tokens, widths, MAX_LABELS], or [tokens, 3, MAX_LABELS] of starts,
    ends and insides.
    """
    labels, (places,), (output,) = _labels(input), annotations, outputs
    scores = sigmoid(output["logits"][: len(places["char_start"]), :, : len(labels)])
    threshold = np.float32(input.threshold or _DEFAULT_THRESHOLD)
    find = _scored_spans if GlinerFacts.of(model).max_width else _marked_spans
    spans = _chosen(find(scores, threshold), input.allow_nested, input.multi_label)
    entities = []
    for span in sorted(spans, key=lambda span: span.first):
        start, end = int(places["char_start"][span.first]), int(places["char_end"][span.last])
        text = input.text[start:end]
        entities.append(Entity(label=labels[span.label], score=span.score, text=text, start=start, end=end))
    return ZeroShotTokenClassificationResult(entities=entities)


class _Span(NamedTuple):
    """A span of words, both ends inclusive."""

    first: int
    last: int
    label: int
    score: float


class _Spans(NamedTuple):
    """Spans of words, both ends inclusive: an array of each field."""

    firsts: Array
    lasts: Array
    labels: Array
    scores: Array


def _scored_spans(scores: Array, threshold: np.float32) -> _Spans:
    """Finds the spans whose score reaches the threshold. `scores`: [words, widths, labels]."""
    firsts, widths, labels = np.nonzero(scores > threshold)
    is_within = firsts + widths < len(scores)
    firsts, widths, labels = firsts[is_within], widths[is_within], labels[is_within]
    return _Spans(firsts, firsts + widths, labels, scores[firsts, widths, labels])


def _marked_spans(scores: Array, threshold: np.float32) -> _Spans:
    """Finds the spans whose start, end and words reach the threshold. A span has the least of their scores.

    `scores`: [words, 3, labels]. Raises InvalidInput for too many spans. Source: gliner 0.2, decoding/decoder.py,
    TokenDecoder, also for the order of the spans.
    """
    starts, ends, insides = scores.transpose(1, 0, 2)
    is_inside, is_end = insides >= threshold, ends > threshold
    places = np.arange(len(scores))[:, None]
    # By word and label: the next word that is outside.
    stops = np.minimum.accumulate(np.where(is_inside, len(scores), places)[::-1])[::-1]
    found, count = list[_Spans](), 0
    for first, label in np.argwhere((starts > threshold) & is_inside).tolist():
        stop = stops[first, label]
        lasts = first + np.flatnonzero(is_end[first:stop, label])
        least = np.minimum.accumulate(insides[first:stop, label])[lasts - first]
        values = np.minimum(np.minimum(least, ends[lasts, label]), starts[first, label])
        found.append(_Spans(np.full_like(lasts, first), lasts, np.full_like(lasts, label), values))
        if (count := count + len(lasts)) > _MAX_SPANS:
            raise InvalidInput("threshold", f"more than {_MAX_SPANS} spans reach {threshold:g}; raise the threshold")
    columns = zip(*found, strict=True) if found else [[np.empty(0, np.int64)]] * 3 + [[np.empty(0, np.float32)]]
    return _Spans(*map(np.concatenate, columns))


def _chosen(spans: _Spans, allow_nested: bool, multi_label: bool) -> Iterator[_Span]:
    """Yields the best spans that do not overlap, best first. Source: gliner 0.2, decoding/decoder.py, greedy_search."""
    order = np.argsort(-spans.scores, kind="stable")
    taken, refused = dict[tuple[int, int], None](), set[tuple[int, int]]()
    starts, ends = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for first, last, label, score in zip(*(column[order].tolist() for column in spans), strict=True):
        if (first, last) in taken:
            if not multi_label:
                continue
        elif (first, last) in refused:
            continue
        else:
            others, other_ends = starts[: len(taken)], ends[: len(taken)]
            overlaps = (others <= last) & (other_ends >= first)
            if allow_nested:
                overlaps &= ~(((first <= others) & (last >= other_ends)) | ((others <= first) & (other_ends >= last)))
            if overlaps.any():
                refused.add((first, last))
                continue
            starts[len(taken)], ends[len(taken)] = first, last
            taken[first, last] = None
        yield _Span(first, last, label, score)


def _labels(input: ZeroShotTokenClassificationInput) -> Sequence[str]:
    return list(dict.fromkeys(input.candidate_labels))


def _kept(words: TokenIds, count: int, room: int, max_words: int, *, is_left: bool) -> tuple[int, int]:
    """Returns the range of a text's tokens that fits, with at most `max_words` words.

    Truncation on the left drops whole words. `words`: int32 [tokens], the word of each token. `count`: all words.
    """
    if not is_left:
        return 0, min(room, int(np.searchsorted(words, max_words)))
    first = max(len(words) - room, int(np.searchsorted(words, count - max_words)))
    return (int(np.searchsorted(words, words[first - 1], side="right")) if first else 0), len(words)


traits = traits_of("text", "truncation", "candidate_labels")
# Entities are parts of the text, so decode reads all of the input.
_ANNOTATIONS = {"char_start": "any", "char_end": "any"}
TASK = Task(
    "zero_shot_token_classification", check, traits, encode, decode, None, GlinerFacts, Annotations(_ANNOTATIONS)
)
