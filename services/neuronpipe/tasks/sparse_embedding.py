"""Sparse embedding: the weights of the vocabulary's tokens for a text (SPLADE). Pooling runs inside the model's graph.

Equal to sentence-transformers' `SparseEncoder.encode(text, prompt_name, max_active_dims=top_k)`, whose tensor has the
same places and weights.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import SparseEmbeddingInput, SparseEmbeddingResult, TokenWeight
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    cut_tokens,
    encode_text,
    traits_of,
)
from neuronpipe.tasks.vectors import PromptFacts, check_prompt

# An output of graphs that weigh the tokens of a text, float32 [tokens], instead of the vocabulary.
TEXT_WEIGHTS = "token_weights"


class SparseFacts(PromptFacts):
    """Facts about a model that weighs tokens."""

    encoded = ("prompt", "prompts", "query_prompts")

    top_k: int = Field(0, ge=0, description="maximum number of tokens of a text, as the model was saved; 0: all")
    query_prompts: tuple[str, ...] = Field(
        (), description="names of the prompts of queries, which are not computed by the model; '': the default"
    )


def check(input: SparseEmbeddingInput, model: ModelSpec) -> None:
    check_text("text", input.text, may_be_empty=True)
    check_prompt(input.prompt_name, SparseFacts.of(model))
    check_truncation(input)


def encode(input: SparseEmbeddingInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the text behind its prompt; `token_ids` int32 [tokens], for weights of its tokens.

    A query that the model does not compute has token ids alone.
    """
    facts = SparseFacts.of(model)
    prompt = facts.prompt_of(input.prompt_name)
    if input.prompt_name in facts.query_prompts:
        token_ids = tokenizer.tokens(prompt + input.text, special_tokens=False).token_ids
        cut_ids = cut_tokens("text", token_ids, model, input.truncation)
        return Encoded([], [{"token_ids": np.unique(cut_ids)}], len(token_ids) - len(cut_ids))
    encoded = encode_text(tokenizer, model, input.text, None, input.truncation, prompt=prompt)
    if all(output.name != TEXT_WEIGHTS for output in model.outputs):
        return encoded
    return encoded._replace(annotations=[{"token_ids": encoded.sequences[0]["input_ids"]}])


def decode(
    input: SparseEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SparseEmbeddingResult:
    """Returns the largest weights above zero, with `tokens` and `query_weights` of decoding_spec."""
    token_ids, weights = (
        _positive_weights(annotations, outputs) if outputs else _query_weights(annotations[0]["token_ids"], model)
    )
    # If weights are equal, the smaller id is first.
    best = np.argsort(-weights, kind="stable")[: input.top_k or SparseFacts.of(model).top_k or None]
    return SparseEmbeddingResult(
        weights=[
            TokenWeight(token_id=token_id, weight=weight, token=model.tokens[token_id])
            for token_id, weight in zip(token_ids[best].tolist(), weights[best].tolist(), strict=True)
        ]
    )


def _query_weights(token_ids: Array, model: ModelSpec) -> tuple[Array, Array]:
    """Returns the distinct ids and the weights above zero of a query's tokens. Raises InvalidInput."""
    if not model.query_weights:
        raise InvalidInput("outputs", "are missing")
    weights = np.array([model.query_weights[token_id] for token_id in token_ids.tolist()], np.float32)
    return token_ids[weights > 0], weights[weights > 0]


def _positive_weights(annotations: ArraySets, outputs: ArraySets) -> tuple[Array, Array]:
    """Returns the ids, ascending, and the weights above zero.

    The weights come from `sparse_embedding`, float32 [vocabulary], or from the weights of a text's tokens. The largest
    weight of each token counts, in all chunks of the text.
    """
    if TEXT_WEIGHTS not in outputs[0]:
        token_ids = np.flatnonzero(outputs[0]["sparse_embedding"] > 0)
        return token_ids, outputs[0]["sparse_embedding"][token_ids]
    if not annotations:
        raise InvalidInput("annotations", "are missing")
    all_ids = np.concatenate([chunk["token_ids"] for chunk in annotations])
    token_ids, places = np.unique(all_ids, return_inverse=True)
    largest = np.zeros(len(token_ids), np.float32)
    np.maximum.at(largest, places, np.concatenate([output[TEXT_WEIGHTS] for output in outputs]))
    return token_ids[largest > 0], largest[largest > 0]


traits = traits_of("text", "prompt_name", "truncation")
_TOKEN_IDS = Annotations({"token_ids": "tokens"}, may_be_missing=True, may_stand_alone=True)
TASK = Task("sparse_embedding", check, traits, encode, decode, ("top_k",), SparseFacts, _TOKEN_IDS)
