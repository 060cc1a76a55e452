"""Sentence embedding: texts to their vectors. Pooling runs inside the model's graph; this file cuts and scales the
vectors.

Equal to sentence-transformers' `encode(text, prompt_name, normalize_embeddings=True, truncate_dim=dimensions)`. With
another `precision`, equal to its `quantize_embeddings` of that vector, for int8 with the ranges of the bundle.

A text in chunks has the mean of the chunks' vectors, weighted by tokens, as with vLLM's `enable_chunked_processing`.
But each chunk has its special tokens and its prompt.

A model that also answers sparse-embedding and multi-vector-embedding (bge-m3) returns these results with the vector,
from the same execution: FlagEmbedding's `return_sparse` and `return_colbert_vecs`.
"""

from itertools import pairwise

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
from neuronpipe.tasks.decoding_checks import check_annotations, check_decodable
from neuronpipe.tasks.feature_extraction import check_vectors_size
from neuronpipe.tasks.many_texts import PART, check_texts, encode_texts, join
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts
from neuronpipe.tasks.vectors import (
    VECTOR_OPTIONS,
    EmbeddingFacts,
    check_prompt,
    check_vector_options,
    vector_of,
    vectors_result,
)


def check(input: SentenceEmbeddingInput, model: ModelSpec) -> None:
    if input.texts:
        _check_texts(input)
    elif not input.token_ids:
        check_text("text", input.text, may_be_empty=True)
    elif input.text:
        raise InvalidInput("token_ids", "replace text; send one of them")
    else:
        check_token_ids(input.token_ids, model)
    if input.prompt_name and input.token_ids:
        raise InvalidInput("prompt_name", "is for a text; no prompt goes before token_ids", ["token_ids"])
    check_prompt(input.prompt_name, EmbeddingFacts.of(model))
    check_vector_options(input, model)
    check_truncation(input)
    check_chunks(input)
    for field, other in _RETURNED.items():
        if getattr(input, field) and other.name not in model.also_answers:
            raise InvalidInput(field, f"is for a model that also answers {other.name.replace('_', '-')}")


def _check_texts(input: SentenceEmbeddingInput) -> None:
    check_texts("texts", input.texts, may_be_empty=True)
    if input.text or input.token_ids:
        other = "text" if input.text else "token_ids"
        raise InvalidInput("texts", f"replace {other}; send one of them", [other])
    for field in _RETURNED:
        if getattr(input, field):
            raise InvalidInput(field, "is for a single text")


def encode(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns a sequence for each chunk: texts are behind the prompt of the input or of the model, token ids alone."""
    if input.texts:
        return _encode_texts(input, tokenizer, model)
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


def _encode_texts(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    prompt = EmbeddingFacts.of(model).prompt_of(input.prompt_name)
    named = [(f"texts[{index}]", text) for index, text in enumerate(input.texts)]
    if not input.max_chunks:
        return join(encode_texts(tokenizer, model, named, input.truncation, prompt))
    parts = [
        encode_chunks(tokenizer, model, text, None, input.truncation, input.max_chunks, name, prompt)
        for name, text in named
    ]
    encoded = join(parts)
    if not encoded.annotations:
        return encoded
    # The only chunk of a text has any weight.
    weights = [chunk for part in parts for chunk in part.annotations or [{TEXT_TOKENS: np.ones(1, np.int32)}]]
    return encoded._replace(
        annotations=[{**part, **chunk} for part, chunk in zip(encoded.annotations, weights, strict=True)]
    )


def decode(
    input: SentenceEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SentenceEmbeddingResult:
    """Returns the vectors from the graph's output for each text or chunk, and the other results that the input asks
    for.
    """
    vectors = np.stack([vector_of(output) for output in outputs])
    if annotations and len(outputs) > 1:
        weights = np.concatenate([chunk[TEXT_TOKENS] for chunk in annotations]).astype(np.float32)
        vectors = np.stack([weights[own] @ vectors[own] / weights[own].sum() for own in _texts_of(annotations, model)])
    result = vectors_result(SentenceEmbeddingResult, vectors, input, model)
    if len(vectors) > 1:
        result.vectors = len(vectors)
    if input.return_sparse:
        check_decodable(sparse_embedding.TASK, model, annotations, outputs)
        result.sparse.CopyFrom(sparse_embedding.decode(SparseEmbeddingInput(), model, annotations, outputs))
    if input.return_multi_vector:
        kept = multi_vector_embedding.decode(MultiVectorEmbeddingInput(), model, (), outputs)
        result.multi_vector.CopyFrom(kept)
    return result


def _texts_of(annotations: ArraySets, model: ModelSpec) -> list[slice]:
    """Returns the chunks of each text."""
    if PART not in annotations[0]:
        return [slice(None)]
    check_annotations(Annotations({PART: 1}), annotations, model)
    parts = np.concatenate([chunk[PART] for chunk in annotations])
    starts = np.flatnonzero(np.diff(parts, prepend=-1)).tolist()
    return [slice(start, end) for start, end in pairwise([*starts, len(parts)])]


_RETURNED = {"return_sparse": sparse_embedding.TASK, "return_multi_vector": multi_vector_embedding.TASK}
traits = traits_of("text", "prompt_name", "truncation", "max_chunks", *_RETURNED, "token_ids", "texts")
_DECODED = *VECTOR_OPTIONS, *_RETURNED
_LENGTHS = Annotations({TEXT_TOKENS: 1}, may_be_missing=True)
TASK = Task("sentence_embedding", check, traits, encode, decode, _DECODED, EmbeddingFacts, _LENGTHS)
