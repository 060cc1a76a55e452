"""Sentence embedding: a text to its vector. Pooling runs inside the model's graph; this file cuts and scales the
vector.

Equal to sentence-transformers' `encode(text, prompt_name, normalize_embeddings=True, truncate_dim=dimensions)`. With
another `precision`, equal to its `quantize_embeddings` of that vector, for int8 with the ranges of the bundle.

A text in chunks has the mean of the chunks' vectors, weighted by tokens, as with vLLM's `enable_chunked_processing`.
But each chunk has its special tokens and its prompt.

A model that also answers sparse-embedding and multi-vector-embedding (bge-m3) returns these results with the vector,
from the same execution: FlagEmbedding's `return_sparse` and `return_colbert_vecs`.
"""

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import (
    MultiVectorEmbeddingInput,
    SentenceEmbeddingInput,
    SentenceEmbeddingResult,
    SparseEmbeddingInput,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks import multi_vector_embedding, sparse_embedding
from neuronpipe.tasks.base import (
    Annotations,
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
from neuronpipe.tasks.decoding_checks import check_decodable
from neuronpipe.tasks.feature_extraction import check_vectors_size
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts
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
    for field, other in _RETURNED.items():
        if getattr(input, field) and other.name not in model.also_answers:
            raise InvalidInput(field, f"is for a model that also answers {other.name.replace('_', '-')}")


def encode(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns a sequence for each chunk: text behind the prompt of the input or of the model, or token ids alone."""
    encoded = _encode_chunks(input, tokenizer, model)
    if not (input.return_sparse or input.return_multi_vector):  # the usual case
        return encoded
    ids = [sequence["input_ids"] for sequence in encoded.sequences]
    if input.return_multi_vector:
        check_vectors_size(sum(map(len, ids)), MultiVectorFacts.of(model).embedding_dimensions)
    if not input.return_sparse:
        return encoded
    counts = encoded.annotations or [{TEXT_TOKENS: np.array([len(chunk)], np.int32)} for chunk in ids]
    return encoded._replace(
        annotations=[{**count, "token_ids": chunk} for count, chunk in zip(counts, ids, strict=True)]
    )


def _encode_chunks(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
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
    """Returns the vector from the graph's output for each chunk, and the other results that the input asks for."""
    vector = vector_of(outputs[0])
    if len(outputs) > 1:
        weights = np.concatenate([chunk[TEXT_TOKENS] for chunk in annotations]).astype(np.float32)
        vector = weights @ np.stack([vector_of(output) for output in outputs]) / weights.sum()
    result = SentenceEmbeddingResult(**vector_fields(vector, input, model))
    if input.return_sparse:
        check_decodable(sparse_embedding.TASK, model, annotations, outputs)
        result.sparse.CopyFrom(sparse_embedding.decode(SparseEmbeddingInput(), model, annotations, outputs))
    if input.return_multi_vector:
        kept = multi_vector_embedding.decode(MultiVectorEmbeddingInput(), model, (), outputs)
        result.multi_vector.CopyFrom(kept)
    return result


_RETURNED = {"return_sparse": sparse_embedding.TASK, "return_multi_vector": multi_vector_embedding.TASK}
traits = traits_of("text", "prompt_name", "truncation", "max_chunks", *_RETURNED, "token_ids")
_DECODED = *VECTOR_OPTIONS, *_RETURNED
_LENGTHS = Annotations({TEXT_TOKENS: 1}, may_be_missing=True)
TASK = Task("sentence_embedding", check, traits, encode, decode, _DECODED, EmbeddingFacts, _LENGTHS)
