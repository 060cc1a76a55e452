"""Limits and joining of tasks with many texts, and hypotheses: sentences that are true if their labels fit."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import LabelScore, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks.base import Encoded, TextTokenizer, check_text, encode_text, text_sequence

MAX_TEXTS = 1024
# Limits the bytes of all pairs. The first text is tokenized again with each of the others, while other texts of the
# model wait. So all pairs together may be as large as the largest input by default.
_MAX_BYTES = 1 << 20
# Limits the tokens. A byte is rarely more than a token, unless a normalization makes many characters of one character.
_MAX_TOKENS = 2 * _MAX_BYTES
# The annotation of sequences: the number of the part that each belongs to.
PART = "part"


def check_texts(name: str, texts: Sequence[str], *, may_be_empty: bool = False) -> None:
    """Refuses an empty list, too many texts, and a text that check_text refuses, named by its index."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidInput(name, f"{len(texts)} texts, must be from 1 to {MAX_TEXTS}")
    for index, text in enumerate(texts):
        check_text(f"{name}[{index}]", text, may_be_empty=may_be_empty)


def check_pairs(first_name: str, first: str, name: str, texts: Sequence[str]) -> None:
    """Refuses pairs of one text with many if they are too large together, even if the input itself is small."""
    size_bytes = len(first.encode()) * len(texts) + sum(len(text.encode()) for text in texts)
    if size_bytes > _MAX_BYTES:
        problem = f"{len(texts)} pairs of {size_bytes} bytes together, the limit is {_MAX_BYTES}"
        raise InvalidInput(f"{first_name} and {name}", problem)


def encode_texts(
    tokenizer: TextTokenizer,
    model: ModelSpec,
    named: Sequence[tuple[str, str]],
    truncation: "Truncation.ValueType",
    prompt: str,
) -> Iterator[Encoded]:
    """Yields the encoding of each of several texts, given with their names for errors, as encode_text encodes it."""
    together = tokenizer.encode_each([text for _, text in named], prompt=prompt)
    for (name, text), encoded in zip(named, together, strict=True):
        if len(encoded.token_ids) <= model.max_tokens:
            yield Encoded([text_sequence(encoded, tokenizer, model, name, prompt)])
        else:
            yield encode_text(tokenizer, model, text, None, truncation, name, prompt)


def join(parts: Iterable[Encoded]) -> Encoded:
    """Joins the sequences of all parts into one input. Each sequence is annotated with PART if a part has several
    sequences. Raises InvalidInput as soon as the sequences have too many tokens.
    """
    sequences, numbers, tokens, truncated_tokens = list[Arrays](), list[int](), 0, 0
    for number, part in enumerate(parts):
        sequences += part.sequences
        numbers += [number] * len(part.sequences)
        truncated_tokens += part.truncated_tokens
        tokens += part.truncated_tokens + sum(len(sequence.get("input_ids", ())) for sequence in part.sequences)
        if tokens > _MAX_TOKENS:
            raise InvalidInput("input", f"more than {_MAX_TOKENS} tokens in the texts together, which is the limit")
    has_chunks = len(set(numbers)) < len(numbers)
    annotations = [{PART: np.array([number], np.int32)} for number in numbers] if has_chunks else []
    return Encoded(sequences, annotations, truncated_tokens)


_PLACE = "{}"


def check_hypotheses(labels: Sequence[str], template: str) -> None:
    """Refuses labels that are no texts, and a template without exactly one place. An empty template is the default."""
    check_texts("candidate_labels", labels)
    if not template:
        return
    check_text("hypothesis_template", template)
    places = template.count(_PLACE)
    if places != 1:
        raise InvalidInput("hypothesis_template", f"must have exactly one {_PLACE} for the label; it has {places}")
    if "{" in template.replace(_PLACE, "") or "}" in template.replace(_PLACE, ""):
        raise InvalidInput("hypothesis_template", f"has a brace other than {_PLACE}")


def hypotheses(labels: Sequence[str], template: str) -> list[str]:
    before, _, after = template.partition(_PLACE)
    return [before + label + after for label in labels]


def ranked_labels(labels: Sequence[str], scores: Array) -> list[LabelScore]:
    """Returns all labels with their scores, best first. Labels of equal score stay in their order."""
    order = np.argsort(-scores, kind="stable")
    ranked = zip(order.tolist(), scores[order].tolist(), strict=True)
    return [LabelScore(label=labels[index], score=score) for index, score in ranked]
