"""Sentence embedding: a text to its vector. Pooling runs inside the model's graph; this file cuts and scales the
vector.

Equal to sentence-transformers' `encode(text, prompt_name, normalize_embeddings=True, truncate_dim=dimensions)`. With
another `precision`, equal to its `quantize_embeddings` of that vector, for int8 with the ranges of the bundle.

A text in chunks has the mean of the chunks' vectors, weighted by tokens, as with vLLM's `enable_chunked_processing`.
But each chunk has its special tokens and its prompt.
"""

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, SentenceEmbeddingResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Encoded,
    EncodedText,
    Task,
    TextTokenizer,
    check_text,
    check_token_ids,
    check_truncation,
    traits_of,
)
from neuronpipe.tasks.chunks import TEXT_TOKENS, check_chunks, divide, encode_chunks, encoded_chunks
from neuronpipe.tasks.vectors import (
    VECTOR_OPTIONS,
    EmbeddingFacts,
    check_prompt,
    check_vector_options,
    vector_fields,
    vector_of,
)


def check(input: SentenceEmbeddingInput, model: ModelSpec) -> None:
    if not input.token_ids:
        check_text("text", input.text, may_be_empty=True)
    elif input.text:
        raise InvalidInput("token_ids", "replace text; send one of them")
    else:
        check_token_ids(input.token_ids, model)
    if input.prompt_name and input.token_ids:
        raise InvalidInput("prompt_name", "is for a text; token_ids have no prompt", ["token_ids"])
    check_prompt(input.prompt_name, EmbeddingFacts.of(model))
    check_vector_options(input, model)
    check_truncation(input)
    check_chunks(input)


def encode(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns a sequence for each chunk: text behind the prompt of the input or of the model, or token ids alone."""
    if input.token_ids:
        none = np.zeros(0, np.int32)
        ids = np.fromiter(input.token_ids, np.int32, len(input.token_ids))
        whole, around = EncodedText(ids, np.zeros_like(ids)), EncodedText(none, none)
        chunks = divide(whole, lambda _: around, model, input.truncation, input.max_chunks, "token_ids")
        return encoded_chunks(chunks, [{"input_ids": chunk.token_ids} for chunk in chunks])
    prompt = EmbeddingFacts.of(model).prompt_of(input.prompt_name)
    return encode_chunks(tokenizer, model, input.text, None, input.truncation, input.max_chunks, prompt=prompt)


def decode(
    input: SentenceEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SentenceEmbeddingResult:
    """Returns the vector from the graph's output for each chunk."""
    vector = vector_of(outputs[0])
    if annotations:
        weights = np.concatenate([chunk[TEXT_TOKENS] for chunk in annotations]).astype(np.float32)
        vector = weights @ np.stack([vector_of(output) for output in outputs]) / weights.sum()
    return SentenceEmbeddingResult(**vector_fields(vector, input, model))


traits = traits_of("text", "prompt_name", "truncation", "max_chunks", "token_ids")
TASK = Task(
    "sentence_embedding",
    check,
    traits,
    encode,
    decode,
    VECTOR_OPTIONS,
    EmbeddingFacts,
    annotations={TEXT_TOKENS: 1},
    may_lack_annotations=True,
    fields_without_tensor=("precision", "token_ids"),
)
