"""Long texts in chunks. Each chunk is a sequence with the tokens around the text: special tokens, a prompt, a query.

Chunks do not overlap. Each has all tokens that the model takes; only the last is shorter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Arrays
from neuronpipe.tasks.base import (
    Encoded,
    EncodedText,
    TextTokenizer,
    encode_text,
    or_default,
    side_of,
    text_sequence,
    too_many_tokens,
)

MAX_CHUNKS = 1024
# The annotation of each chunk: the number of its tokens that are tokens of the text.
TEXT_TOKENS = "text_tokens"

# Fillers replace a text, to find the tokens around it: no token of one filler equals a token of the other
# (sentence-transformers, _chat_template_suffix_ids in base/modules/transformer.py).
_FILLERS = ("0", "1 2 3 4")
# Encodes a text with the tokens around it.
Encode: TypeAlias = Callable[[str], EncodedText]


@dataclass(frozen=True, slots=True)
class Chunk(EncodedText):
    """A sequence with a part of a text. `text_tokens`: the number of its tokens that are tokens of the text."""

    text_tokens: int = field(kw_only=True)


def check_chunks(input: Any) -> None:
    if input.max_chunks > MAX_CHUNKS:
        raise InvalidInput("max_chunks", f"{input.max_chunks}, the limit is {MAX_CHUNKS}")


def encode_chunks(
    tokenizer: TextTokenizer,
    model: ModelSpec,
    text: str,
    text_pair: str | None,
    truncation: "Truncation.ValueType",
    max_chunks: int,
    field_name: str = "text",
    prompt: str = "",
) -> Encoded:
    """Encodes a text or a pair as encode_text does. With `max_chunks`, a long text becomes several sequences.

    The second text of a pair is divided. Raises InvalidInput.
    """
    if not max_chunks:
        return encode_text(tokenizer, model, text, text_pair, truncation, field_name, prompt)

    def encode(part: str) -> EncodedText:
        return tokenizer.encode(*((part, None) if text_pair is None else (text, part)), prompt=prompt)

    whole = encode(text if text_pair is None else text_pair)
    chunks = divide(whole, encode, model, truncation, max_chunks, field_name)
    return encoded_chunks(chunks, [text_sequence(chunk, tokenizer, model, field_name, prompt) for chunk in chunks])


def encoded_chunks(chunks: Sequence[Chunk], sequences: Sequence[Arrays]) -> Encoded:
    """Returns the encoding of a text's chunks; several have the annotation TEXT_TOKENS."""
    annotations = [{TEXT_TOKENS: np.array([chunk.text_tokens], np.int32)} for chunk in chunks]
    truncated_tokens = sum(chunk.truncated_tokens for chunk in chunks)
    return Encoded(sequences, annotations if len(chunks) > 1 else (), truncated_tokens)


def divide(
    whole: EncodedText,
    encode: Encode,
    model: ModelSpec,
    truncation: "Truncation.ValueType",
    max_chunks: int,
    field_name: str,
    around_field: str = "",
) -> list[Chunk]:
    """Divides a sequence that is too long into at most `max_chunks` chunks, or cuts it to a chunk if that is 0.

    `encode`: encodes any text as it encoded `whole`. `around_field`: the field with most tokens around the text.
    Raises InvalidInput.
    """
    tokens, limit = len(whole.token_ids), model.max_tokens
    if tokens <= limit:
        return [Chunk(whole.token_ids, whole.token_type_ids, text_tokens=tokens)]
    before, behind = _around(whole, encode)
    after = len(behind.token_ids)
    room = limit - before - after
    if room < 1:
        problem = f"{before + after} tokens around the text leave no room for it, the limit is {model.token_limit}"
        raise InvalidInput(around_field or field_name, problem)
    places = np.arange(before, tokens - after)
    dropped = max(len(places) - room * max(max_chunks, 1), 0)
    if dropped and or_default(truncation) == Truncation.TRUNCATION_ERROR:
        if not max_chunks:
            raise too_many_tokens(field_name, tokens, model)
        problem = f"{-(-len(places) // room)} chunks of {room} tokens, the limit is {max_chunks} (max_chunks)"
        raise InvalidInput(field_name, problem, ["max_chunks"])
    places = places[dropped:] if side_of(truncation) == "left" else places[: len(places) - dropped]
    chunks = list[Chunk]()
    for start in range(0, len(places), room):
        kept = np.concatenate([np.arange(before), places[start : start + room]])
        token_ids = np.concatenate([whole.token_ids[kept], behind.token_ids])
        types = np.concatenate([whole.token_type_ids[kept], behind.token_type_ids])
        chunks.append(Chunk(token_ids, types, 0 if start else dropped, text_tokens=len(kept) - before))
    return chunks


def _around(whole: EncodedText, encode: Encode) -> tuple[int, EncodedText]:
    """Returns the number of tokens before the text, and the tokens behind the text."""
    first, second = map(encode, _FILLERS)

    def common(step: int, *sequences: EncodedText) -> int:
        columns = zip(*(sequence.token_ids[::step].tolist() for sequence in sequences), strict=False)
        return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))

    end = len(first.token_ids) - common(-1, first, second)
    return common(1, first, second, whole), EncodedText(first.token_ids[end:], first.token_type_ids[end:])
