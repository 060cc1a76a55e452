"""Sentence embedding: a text to its vector. Pooling runs inside the model's graph; this file cuts and scales the
vector.

Equal to sentence-transformers' `encode(text, prompt_name, normalize_embeddings=True, truncate_dim=dimensions)`. With
another `precision`, equal to its `quantize_embeddings` of that vector, for int8 with the ranges of the bundle.
"""

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, SentenceEmbeddingResult
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
    traits_of,
)
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


def encode(input: SentenceEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence: the text behind the prompt of the input or of the model, or the token ids alone."""
    if input.token_ids:
        return encode_token_ids(input.token_ids, model, input.truncation)
    prompt = EmbeddingFacts.of(model).prompt_of(input.prompt_name)
    return encode_text(tokenizer, model, input.text, None, input.truncation, prompt=prompt)


def decode(
    input: SentenceEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SentenceEmbeddingResult:
    """Returns the vector from the graph's output."""
    return SentenceEmbeddingResult(**vector_fields(vector_of(outputs[0]), input, model))


traits = traits_of("text", "prompt_name", "truncation", "token_ids")
TASK = Task(
    "sentence_embedding",
    check,
    traits,
    encode,
    decode,
    VECTOR_OPTIONS,
    EmbeddingFacts,
    fields_without_tensor=("precision", "token_ids"),
)
