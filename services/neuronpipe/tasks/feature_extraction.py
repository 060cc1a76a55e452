"""Feature extraction: the token vectors of a text or a pair, or vectors pooled from them, as bytes.

The token vectors equal the vectors of transformers' FeatureExtractionPipeline, special tokens included. Late chunking
(arXiv 2409.04701) pools the vectors of each chunk, which are computed from the text as a whole.
"""

from typing import Any

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    FeatureExtractionResult,
    FeaturePooling,
    FeatureType,
    TextSpan,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    LocatedText,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    cut_located,
    encode_text,
    or_default,
    sequence,
)

# Limit for the vectors between the stages, for every pooling: half of the default message limit.
_MAX_BYTES = 32 << 20
_MAX_CHUNKS = 1024

_POOLINGS, _TYPES = frozenset(FeaturePooling.values()), frozenset(FeatureType.values())
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
_LARGEST_INT8 = 127

# Annotations of each chunk: its tokens, and its part of the text, ends exclusive.
_ANNOTATIONS = {"first_token": "any", "end_token": "any", "char_start": "any", "char_end": "any"}


class FeatureFacts(TaskFacts):
    """Facts about a model that makes a vector of each token."""

    public_fields = ("embedding_dimensions",)

    embedding_dimensions: int = Field(ge=1)


def check(input: FeatureExtractionInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    if input.text_pair:
        check_text("text_pair", input.text_pair)
    if input.pooling not in _POOLINGS:
        raise InvalidInput("pooling", f"{input.pooling} is not known")
    check_type(input.type)
    check_truncation(input)
    if input.chunk_tokens or input.chunks:
        _check_chunks(input)


def _check_chunks(input: FeatureExtractionInput) -> None:
    name = "chunks" if input.chunks else "chunk_tokens"
    if input.chunks and input.chunk_tokens:
        raise InvalidInput("chunks", "replace chunk_tokens; send one of them", ["chunk_tokens"])
    if input.text_pair:
        raise InvalidInput(name, "is for one text; leave out text_pair", ["text_pair"])
    if input.pooling == FeaturePooling.FEATURE_POOLING_CLS:
        raise InvalidInput("pooling", "the vectors of chunks are means; leave it out")
    if len(input.chunks) > _MAX_CHUNKS:
        raise InvalidInput("chunks", f"{len(input.chunks)} chunks, the limit is {_MAX_CHUNKS}")
    for index, chunk in enumerate(input.chunks):
        if not chunk.start < chunk.end <= len(input.text):
            problem = f"is from {chunk.start} to {chunk.end}; the text has {len(input.text)} characters"
            raise InvalidInput(f"chunks[{index}]", problem)


def traits(input: FeatureExtractionInput) -> tuple[str | int, ...]:
    """Returns the values of an input on which its encoding depends."""
    spans = [place for chunk in input.chunks for place in (chunk.start, chunk.end)]
    return input.text, input.text_pair, or_default(input.truncation), input.chunk_tokens, *spans


def encode(input: FeatureExtractionInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the text or the pair, and for requested chunks the annotations `_ANNOTATIONS`."""
    if input.chunk_tokens or input.chunks:
        located = cut_located(tokenizer.locate(input.text), model, input.truncation)
        encoded = Encoded([sequence(located, model)], [_chunks(input, located)], located.truncated_tokens)
    else:
        encoded = encode_text(tokenizer, model, input.text, input.text_pair or None, input.truncation)
    check_vectors_size(len(encoded.sequences[0]["input_ids"]), FeatureFacts.of(model).embedding_dimensions)
    return encoded


def _chunks(input: FeatureExtractionInput, located: LocatedText) -> Arrays:
    text_tokens = np.flatnonzero(located.char_start >= 0)
    if not len(text_tokens):
        raise InvalidInput("text", "has no tokens")
    if input.chunk_tokens:
        size = input.chunk_tokens
        parts = [text_tokens[begin : begin + size] for begin in range(0, len(text_tokens), size)]
    else:
        # Tokens of byte-level BPE begin with the space before a word, so their last character decides.
        last = np.maximum(located.char_end[text_tokens] - 1, located.char_start[text_tokens])
        parts = [text_tokens[(last >= chunk.start) & (last < chunk.end)] for chunk in input.chunks]
    for index, part in enumerate(parts):
        if not len(part):
            raise InvalidInput(f"chunks[{index}]", "has no token of the text, or none that truncation left")
    chunks = [(part[0], part[-1] + 1, located.char_start[part[0]], located.char_end[part[-1]]) for part in parts]
    return dict(zip(_ANNOTATIONS, np.array(chunks, np.int32).reshape(-1, len(_ANNOTATIONS)).T, strict=True))


def decode(
    input: FeatureExtractionInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> FeatureExtractionResult:
    """Returns the vectors from `last_hidden_state`, float32 [tokens, embedding_dimensions]."""
    vectors = outputs[0]["last_hidden_state"]
    if annotations:
        return _chunk_result(input, annotations[0], vectors)
    if input.pooling == FeaturePooling.FEATURE_POOLING_CLS:
        vectors = vectors[0]
    elif input.pooling == FeaturePooling.FEATURE_POOLING_MEAN:
        vectors = vectors.mean(axis=0)
    return FeatureExtractionResult(**numbers_of(vectors, input.type))


def _chunk_result(input: FeatureExtractionInput, chunks: Arrays, vectors: Array) -> FeatureExtractionResult:
    first_tokens, end_tokens, char_starts, char_ends = (chunks[name].tolist() for name in _ANNOTATIONS)
    if not len(first_tokens) == len(end_tokens) == len(char_starts) == len(char_ends) or not all(
        0 <= start < end <= len(vectors) for start, end in zip(first_tokens, end_tokens, strict=True)
    ):
        raise InvalidInput("annotations", f"have chunks beyond the {len(vectors)} tokens of the text")
    means = np.stack([vectors[start:end].mean(axis=0) for start, end in zip(first_tokens, end_tokens, strict=True)])
    spans = [TextSpan(start=start, end=end) for start, end in zip(char_starts, char_ends, strict=True)]
    return FeatureExtractionResult(**numbers_of(means, input.type), chunks=spans)


def check_type(type: "FeatureType.ValueType") -> None:
    """Refuses an unknown data type, which a newer client may send."""
    if type not in _TYPES:
        raise InvalidInput("type", f"{type} is not known")


def check_vectors_size(tokens: int, dimensions: int) -> None:
    """Refuses a text whose token vectors together are larger than the stages' limit."""
    size_bytes = tokens * dimensions * np.dtype(np.float32).itemsize
    if size_bytes > _MAX_BYTES:
        problem = f"{tokens} tokens have vectors of {size_bytes} bytes together, the limit is {_MAX_BYTES}"
        raise InvalidInput("text", problem)


def numbers_of(vectors: Array, type: "FeatureType.ValueType") -> dict[str, Any]:
    """Returns the fields of a result for vectors, float32 [vectors, width] or [width]. Raises InvalidInput."""
    if type == FeatureType.FEATURE_TYPE_INT8:
        numbers, scales = _quantized(vectors)
        return {"data": numbers.tobytes(), "shape": vectors.shape, "type": type, "scales": scales.tolist()}
    if type == FeatureType.FEATURE_TYPE_FLOAT16:
        return {"data": _halved(vectors).tobytes(), "shape": vectors.shape, "type": type}
    data = vectors.astype("<f4", copy=False).tobytes()
    return {"data": data, "shape": vectors.shape, "type": FeatureType.FEATURE_TYPE_FLOAT32}


def _quantized(vectors: Array) -> tuple[Array, Array]:
    """Returns the vectors as int8 of the same shape, and the scale of each vector, float32 [vectors]."""
    scales: Array = np.abs(vectors).max(axis=-1, keepdims=True) / np.float32(_LARGEST_INT8)
    numbers = np.rint(vectors / np.where(scales > 0, scales, np.float32(1)))
    return numbers.clip(-_LARGEST_INT8, _LARGEST_INT8).astype(np.int8), scales.ravel()


def _halved(vectors: Array) -> Array:
    largest = float(np.abs(vectors).max(initial=0))
    if largest > _LARGEST_FLOAT16:
        problem = f"the largest value is {largest:g}, the limit of float16 is {_LARGEST_FLOAT16:g}; use float32 or int8"
        raise InvalidInput("type", problem)
    return vectors.astype("<f2")


_DECODED = "pooling", "type"
_CHUNKS = Annotations(_ANNOTATIONS, may_be_missing=True)
TASK = Task("feature_extraction", check, traits, encode, decode, _DECODED, FeatureFacts, _CHUNKS)
