"""Reranking: sorts texts by how well they answer a query, as a cross-encoder scores them.

Equal to sentence-transformers' `CrossEncoder.rank` with `top_k` and `activation_fn`, except for texts with equal scores
there. Where float32's sigmoid is 1.0 for several texts, they are sorted by their logits here.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import RankedText, RerankInput, RerankResult, ScoreFunction, Truncation
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Encoded,
    Task,
    TextTokenizer,
    TokenIds,
    check_text,
    check_truncation,
    encode_text,
    or_default,
    side_of,
)
from neuronpipe.tasks.many_texts import check_pairs, check_texts, join
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts, encode_kind, kept_vectors, max_similarity
from neuronpipe.tasks.scores import ScoreFunctionName, check_function, scores_of


class RerankFacts(TaskFacts):
    """Facts about a cross-encoder."""

    encoded = ("prompt", "template", "compares_tokens")

    score_function: ScoreFunctionName = Field(
        "sigmoid", description="how sentence-transformers makes scores of its logits"
    )
    prompt: str = Field("", description="text that sentence-transformers puts before every query")
    compares_tokens: bool = Field(
        False, description="whether texts are encoded one by one, and compared by the vectors of their tokens"
    )
    template: tuple[tuple[int, ...] | str, ...] = Field(
        (),
        description="of a decoder: the whole sequence in parts, which are tokens, or texts with {query} and {document}",
    )


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
    check_truncation(input)


def traits(input: RerankInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return input.query, or_default(input.truncation), *input.texts


def encode(input: RerankInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """One sequence of the query, behind the model's prompt if it has one, and each text."""
    facts = RerankFacts.of(model)
    if facts.compares_tokens:
        named = [("query", input.query), *((f"texts[{index}]", text) for index, text in enumerate(input.texts))]
        return join(
            encode_kind(text, tokenizer, model, input.truncation, name, is_query=not number)
            for number, (name, text) in enumerate(named)
        )
    if facts.template:
        return join(_written(facts.template, input, index, tokenizer, model) for index in range(len(input.texts)))
    return join(
        encode_text(tokenizer, model, input.query, text, input.truncation, f"query and texts[{index}]", facts.prompt)
        for index, text in enumerate(input.texts)
    )


def _written(
    template: Sequence[Sequence[int] | str], input: RerankInput, index: int, tokenizer: TextTokenizer, model: ModelSpec
) -> Encoded:
    """The template with the query and a text, which loses tokens at its end if the caller allows it.

    Raises InvalidInput, which names both lengths.
    """
    parts = [_filled(part, input.query, input.texts[index], tokenizer) for part in template]
    excess = max(sum(map(len, parts)) - model.max_tokens, 0)
    if excess:
        field = f"query and texts[{index}]"
        if side_of(input.truncation) == "left":
            raise InvalidInput("truncation", "left: this model reads texts in a template, of which only the end is cut")
        if or_default(input.truncation) == Truncation.TRUNCATION_ERROR:
            tokens = model.max_tokens + excess
            raise InvalidInput(field, f"{tokens} tokens, the model takes {model.token_limit}; set truncation to cut")
        number = next(number for number, part in enumerate(template) if isinstance(part, str) and "{document}" in part)
        before = _filled(str(template[number]).partition("{document}")[0], input.query, "", tokenizer)
        if len(parts[number]) - len(before) <= excess:
            raise InvalidInput(field, f"the query leaves no room for a text, the limit is {model.token_limit}")
        parts[number] = parts[number][:-excess]
    return Encoded([{"input_ids": np.concatenate(parts)}], truncated_tokens=excess)


def _filled(part: Sequence[int] | str, query: str, document: str, tokenizer: TextTokenizer) -> TokenIds:
    """A part of a template as tokens, int32 [tokens]."""
    if not isinstance(part, str):
        return np.array(part, np.int32)
    return tokenizer.tokens(part.format(query=query, document=document), special_tokens=False).token_ids


def decode(input: RerankInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> RerankResult:
    """The best texts from `logits`, float32 [1], of each sequence, or from the vectors of the query and each text."""
    facts = RerankFacts.of(model)
    if facts.compares_tokens:
        query, *texts = map(kept_vectors, outputs)
        late = MultiVectorFacts.of(model)
        logits = np.array([max_similarity(query, text, late) for text in texts], np.float32)
    else:
        logits = np.concatenate([output["logits"] for output in outputs])
    scores = scores_of(logits, input.function, facts.score_function).tolist()
    # Equal texts stay in the order of the request.
    order = np.argsort(-logits, kind="stable")[: input.top_n or len(logits)]
    return RerankResult(texts=[RankedText(index=index, score=scores[index]) for index in order.tolist()])


TASK = Task("rerank", check, traits, encode, decode, ("top_n", "function"), RerankFacts)
