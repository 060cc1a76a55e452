"""Multi-vector embedding: a vector of each token, for late interaction (ColBERT). Queries and documents differ.

Equal to sentence-transformers' `MultiVectorEncoder.encode_query` and `encode_document`.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import MultiVectorEmbeddingInput, MultiVectorEmbeddingResult, Truncation
from neuronpipe.core.model import Frozen, ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, traits_of
from neuronpipe.tasks.chunks import encode_chunks
from neuronpipe.tasks.feature_extraction import check_type, check_vectors_size, numbers_of

OUTPUT, ROLE = "token_embeddings", "token_role"
# Roles of a token: seen by other tokens or not, with a vector in the result or not. Role 0 is padding.
SEEN_AND_KEPT, SEEN, KEPT = 1, 2, 3


class TextKind(Frozen):
    """The conversion of the texts of one kind, queries or documents, into tokens."""

    max_tokens: int = Field(ge=3, description="maximum number of tokens, special tokens included")
    prefix: str = Field("", description="text that is put before every text")
    prefix_ids: tuple[int, ...] = Field((), description="tokens that are put before the prefix")
    prefix_at: int = Field(0, description="number of special tokens before prefix_ids")
    skipped_ids: tuple[int, ...] = Field((), description="tokens whose vectors are left out, such as punctuation")
    expanded_to: int = Field(0, description="number of tokens to which shorter texts are expanded; 0: none")
    expansion_id: int = 0
    sees_expansion: bool = Field(False, description="whether the other tokens see the tokens of the expansion")


class MultiVectorFacts(TaskFacts):
    """Facts about a model that makes a vector of each token, for late interaction."""

    encoded = ("query", "document")
    public_fields = ("embedding_dimensions",)

    embedding_dimensions: int = Field(ge=1)
    query: TextKind
    document: TextKind
    divides_by_tokens: bool = Field(False, description="whether a score is a mean over the query's tokens, not a sum")


def check(input: MultiVectorEmbeddingInput, model: ModelSpec) -> None:
    check_text("text", input.text, may_be_empty=True)
    check_type(input.type)
    check_truncation(input)


def encode(input: MultiVectorEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence, with `token_role` int32 [tokens] if the model takes it."""
    encoded = encode_kind(input.text, tokenizer, model, input.truncation, is_query=input.is_query)
    check_vectors_size(len(encoded.sequences[0]["input_ids"]), MultiVectorFacts.of(model).embedding_dimensions)
    return encoded


def encode_kind(
    text: str,
    tokenizer: TextTokenizer,
    model: ModelSpec,
    truncation: "Truncation.ValueType",
    max_chunks: int = 0,
    field_name: str = "text",
    *,
    is_query: bool,
) -> Encoded:
    """Encodes a query or a document as one sequence, or as one sequence for each of its chunks. Raises InvalidInput."""
    facts = MultiVectorFacts.of(model)
    kind = facts.query if is_query else facts.document
    room = model.model_copy(update={"max_tokens": min(kind.max_tokens, model.max_tokens) - len(kind.prefix_ids)})
    encoded = encode_chunks(tokenizer, room, text, None, truncation, max_chunks, field_name, kind.prefix)
    sequences = [_sequence(encoded_part["input_ids"], kind, model) for encoded_part in encoded.sequences]
    return Encoded(sequences, truncated_tokens=encoded.truncated_tokens)


def _sequence(token_ids: Array, kind: TextKind, model: ModelSpec) -> Arrays:
    token_ids = np.insert(token_ids, min(kind.prefix_at, len(token_ids)), kind.prefix_ids).astype(np.int32)
    roles = np.where(np.isin(token_ids, kind.skipped_ids), SEEN, SEEN_AND_KEPT)
    missing = max(min(kind.expanded_to, model.max_tokens) - len(token_ids), 0)
    sequence: dict[str, Array] = {"input_ids": np.append(token_ids, [kind.expansion_id] * missing).astype(np.int32)}
    if ROLE in model.inputs:
        expansion_role = SEEN_AND_KEPT if kind.sees_expansion else KEPT
        sequence[ROLE] = np.append(roles, [expansion_role] * missing).astype(np.int32)
    return sequence


def decode(
    input: MultiVectorEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> MultiVectorEmbeddingResult:
    """Returns the vectors from `token_embeddings`, float32 [tokens, embedding_dimensions], without tokens left out.

    A text in chunks has an output for each chunk.
    """
    kept = [kept_vectors(output) for output in outputs]
    return MultiVectorEmbeddingResult(**numbers_of(np.concatenate(kept), input.type))


def kept_vectors(output: Arrays) -> Array:
    """Returns the vectors of an output that are not left out: float32 [vectors, embedding_dimensions]."""
    vectors = output[OUTPUT]
    selected: Array = vectors[vectors.any(axis=1)]
    return selected


def max_similarity(query: Array, document: Array, facts: MultiVectorFacts) -> float:
    """Returns MaxSim: the sum over a query's vectors of the largest product with a vector of the document."""
    if not len(query) or not len(document):
        return 0.0
    total = float((query @ document.T).max(axis=1).sum())
    return total / len(query) if facts.divides_by_tokens else total


traits = traits_of("text", "is_query", "truncation")
TASK = Task("multi_vector_embedding", check, traits, encode, decode, ("type",), MultiVectorFacts)
