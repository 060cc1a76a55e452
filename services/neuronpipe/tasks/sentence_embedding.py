"""Sentence embedding: a text to its vector. Pooling runs inside the model's graph; here the vector is cut and scaled.

Equal to sentence-transformers' `encode(text, prompt_name, normalize_embeddings=True, truncate_dim=dimensions)`,
and with a binary `precision` to its `quantize_embeddings` of that.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision, SentenceEmbeddingInput, SentenceEmbeddingResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Encoded,
    Task,
    TextTokenizer,
    check_text,
    check_token_ids,
    check_truncation,
    encode_text,
    encode_token_ids,
    or_default,
)
from neuronpipe.tasks.prompts import PromptFacts, check_prompt

# The smallest norm that a vector is divided by, as in torch.nn.functional.normalize.
SMALLEST_NORM = 1e-12

_PRECISIONS = frozenset(EmbeddingPrecision.values())
_BINARY = (EmbeddingPrecision.EMBEDDING_PRECISION_BINARY, EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY)


class EmbeddingFacts(PromptFacts):
    """Facts about a model that makes one vector of a text."""

    told = ("embedding_dimensions", "prompt_names")

    embedding_dimensions: int = Field(ge=1)


def check(input: SentenceEmbeddingInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    if not input.token_ids:
        check_text("text", input.text)
    elif input.text:
        raise InvalidInput("token_ids", "stand in place of text; send one of them")
    else:
        check_token_ids(input.token_ids, model)
    if input.prompt_name and input.token_ids:
        raise InvalidInput("prompt_name", "is for a text; token_ids have no prompt")
    check_prompt(input.prompt_name, EmbeddingFacts.of(model))
    check_dimensions(input.dimensions, model)
    _check_precision(input, model)
    check_truncation(input.truncation)


def traits(input: SentenceEmbeddingInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return input.text, input.prompt_name, or_default(input.truncation), *input.token_ids


def encode(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """One sequence of the text, behind the prompt that it names or else the model's, or of the token ids alone."""
    if input.token_ids:
        return encode_token_ids(input.token_ids, model, input.truncation)
    prompt = EmbeddingFacts.of(model).prompt_of(input.prompt_name)
    return encode_text(tokenizer, model, prompt + input.text, None, input.truncation)


def decode(
    input: SentenceEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SentenceEmbeddingResult:
    """The vector from `sentence_embedding`, float32 [embedding_dimensions]."""
    embedding = outputs[0]["sentence_embedding"][: input.dimensions or None]
    if input.precision in _BINARY:
        # Of signed numbers the highest bit is the other way round, which is as much as 128 less.
        flipped = np.uint8(128 if input.precision == EmbeddingPrecision.EMBEDDING_PRECISION_BINARY else 0)
        return SentenceEmbeddingResult(
            packed=(np.packbits(embedding > 0) ^ flipped).tobytes(), precision=input.precision
        )
    if not input.skip_normalize:
        embedding = embedding / max(float(np.linalg.norm(embedding)), SMALLEST_NORM)
    return SentenceEmbeddingResult(embedding=embedding.tolist())


def _check_precision(input: SentenceEmbeddingInput, model: ModelSpec) -> None:
    if input.precision not in _PRECISIONS:
        raise InvalidInput("precision", f"{input.precision} is not known")
    dimensions = input.dimensions or EmbeddingFacts.of(model).embedding_dimensions
    if input.precision in _BINARY and dimensions % 8:
        raise InvalidInput("precision", f"binary vectors have a multiple of 8 dimensions, not {dimensions}")


def check_dimensions(dimensions: int, model: ModelSpec) -> None:
    """Refuses more dimensions than the model's vectors have."""
    limit = EmbeddingFacts.of(model).embedding_dimensions
    if dimensions > limit:
        raise InvalidInput("dimensions", f"{dimensions}, the model has {limit}")


TASK = Task(
    "sentence_embedding", check, traits, encode, decode, ("dimensions", "skip_normalize", "precision"), EmbeddingFacts
)
