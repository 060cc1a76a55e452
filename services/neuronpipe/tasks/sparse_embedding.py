"""Sparse embedding: the weights of the vocabulary's tokens for a text (SPLADE). Pooling runs inside the model's graph.

Equal to sentence-transformers' `SparseEncoder.encode(text, prompt_name, max_active_dims=top_k)`, whose tensor has the
same places and weights.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import SparseEmbeddingInput, SparseEmbeddingResult, TokenWeight
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, traits_of
from neuronpipe.tasks.vectors import PromptFacts, check_prompt


class SparseFacts(PromptFacts):
    """Facts about a model that weighs tokens."""

    top_k: int = Field(0, ge=0, description="maximum number of tokens of a text, as the model was saved; 0: all")


def check(input: SparseEmbeddingInput, model: ModelSpec) -> None:
    check_text("text", input.text, may_be_empty=True)
    check_prompt(input.prompt_name, SparseFacts.of(model))
    check_truncation(input)


def encode(input: SparseEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the text, behind its prompt."""
    prompt = SparseFacts.of(model).prompt_of(input.prompt_name)
    return encode_text(tokenizer, model, input.text, None, input.truncation, prompt=prompt)


def decode(
    input: SparseEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SparseEmbeddingResult:
    """Returns the largest numbers above zero of `sparse_embedding`, float32 [vocabulary]; see decoding_spec."""
    weights = outputs[0]["sparse_embedding"]
    places = np.flatnonzero(weights > 0)
    # If weights are equal, the smaller id is first.
    best = places[np.argsort(-weights[places], kind="stable")][: input.top_k or SparseFacts.of(model).top_k or None]
    return SparseEmbeddingResult(
        weights=[
            TokenWeight(token_id=token_id, weight=weight, token=model.tokens[token_id])
            for token_id, weight in zip(best.tolist(), weights[best].tolist(), strict=True)
        ]
    )


traits = traits_of("text", "prompt_name", "truncation")
TASK = Task("sparse_embedding", check, traits, encode, decode, ("top_k",), SparseFacts)
