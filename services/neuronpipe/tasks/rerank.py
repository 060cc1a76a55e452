"""Reranking: sorts texts by how well they answer a query, as a cross-encoder scores them.

Equal to sentence-transformers' `CrossEncoder.rank` with `top_k` and `activation_fn`, except for texts with equal scores
there. Where float32's sigmoid is 1.0 for several texts, they are sorted by their logits here.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import RankedText, RerankInput, RerankResult, ScoreFunction
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, or_default
from neuronpipe.tasks.many_texts import check_pairs, check_texts, join
from neuronpipe.tasks.scores import ScoreFunctionName, check_function, scores_of


class RerankFacts(TaskFacts):
    """Facts about a cross-encoder."""

    encoded = ("prompt",)

    score_function: ScoreFunctionName = Field(
        "sigmoid", description="how sentence-transformers makes scores of its logits"
    )
    prompt: str = Field("", description="text that sentence-transformers puts before every query")


def check(input: RerankInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_text("query", input.query)
    check_texts("texts", input.texts)
    check_pairs("query", input.query, "texts", input.texts)
    if input.top_n > len(input.texts):
        raise InvalidInput("top_n", f"{input.top_n}, there are {len(input.texts)} texts")
    check_function(input.function)
    if input.function == ScoreFunction.SCORE_FUNCTION_SOFTMAX:
        raise InvalidInput("function", "softmax needs several labels, and this model has one; use sigmoid or none")
    check_truncation(input.truncation)


def traits(input: RerankInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return input.query, or_default(input.truncation), *input.texts


def encode(input: RerankInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """One sequence of the query, behind the model's prompt if it has one, and each text."""
    query = RerankFacts.of(model).prompt + input.query
    return join(
        encode_text(tokenizer, model, query, text, input.truncation, f"query and texts[{index}]")
        for index, text in enumerate(input.texts)
    )


def decode(input: RerankInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> RerankResult:
    """The best texts from `logits`, float32 [1], of each sequence."""
    logits = np.concatenate([output["logits"] for output in outputs])
    scores = scores_of(logits, input.function, RerankFacts.of(model).score_function).tolist()
    # Equal texts stay in the order of the request.
    order = np.argsort(-logits, kind="stable")[: input.top_n or len(logits)]
    return RerankResult(texts=[RankedText(index=index, score=scores[index]) for index in order.tolist()])


TASK = Task("rerank", check, traits, encode, decode, ("top_n", "function"), RerankFacts)
