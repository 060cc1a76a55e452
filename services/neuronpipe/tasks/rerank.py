"""Reranking: sorts texts by how well they answer a query, as a cross-encoder scores them.

Equal to sentence-transformers' `CrossEncoder.rank` with `top_k` and `activation_fn`, except for texts with equal scores
there. If the sigmoid of several texts is 1.0 in float32, their logits decide the order here.
"""

from collections.abc import Sequence
from itertools import takewhile

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
    too_long,
    traits_of,
)
from neuronpipe.tasks.many_texts import check_pairs, check_texts, join
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts, encode_kind, kept_vectors, max_similarity
from neuronpipe.tasks.scores import ScoreFunctionName, check_function, scores_of

# Fillers replace a text in a template, to find the tokens behind the text: no token of one filler equals a token of the
# other (sentence-transformers, _chat_template_suffix_ids in base/modules/transformer.py).
_FILLERS = ("0", "1 2 3 4")


class RerankFacts(TaskFacts):
    """Facts about a cross-encoder."""

    encoded = ("prompt", "template", "compares_tokens")

    score_function: ScoreFunctionName = Field(
        "sigmoid", description="function with which sentence-transformers makes scores of the logits"
    )
    prompt: str = Field("", description="text that sentence-transformers puts before every query")
    compares_tokens: bool = Field(
        False, description="whether texts are encoded one by one, and compared by the vectors of their tokens"
    )
    template: tuple[tuple[int, ...] | str, ...] = Field(
        (), description="parts of a decoder's whole sequence: tokens, or texts with {query} and {document}"
    )


def check(input: RerankInput, model: ModelSpec) -> None:
    check_text("query", input.query)
    check_texts("texts", input.texts, may_be_empty=True)
    check_pairs("query", input.query, "texts", input.texts)
    if input.top_n > len(input.texts):
        raise InvalidInput("top_n", f"{input.top_n}, there are {len(input.texts)} texts")
    check_function(input.function)
    if input.function == ScoreFunction.SCORE_FUNCTION_SOFTMAX:
        raise InvalidInput("function", "softmax needs several labels, and this model has one; use sigmoid or none")
    check_truncation(input)


def encode(input: RerankInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the query and each text, behind the model's prompt, if any."""
    facts = RerankFacts.of(model)
    if facts.compares_tokens:
        named = [("query", input.query), *((f"texts[{index}]", text) for index, text in enumerate(input.texts))]
        return join(
            encode_kind(text, tokenizer, model, input.truncation, name, is_query=not number)
            for number, (name, text) in enumerate(named)
        )
    if facts.template:
        return join(_fill_template(facts.template, input, index, tokenizer, model) for index in range(len(input.texts)))
    return join(
        encode_text(tokenizer, model, input.query, text, input.truncation, f"query and texts[{index}]", facts.prompt)
        for index, text in enumerate(input.texts)
    )


def _fill_template(
    template: Sequence[Sequence[int] | str], input: RerankInput, index: int, tokenizer: TextTokenizer, model: ModelSpec
) -> Encoded:
    """Fills the template with the query and a text, whose end may be cut. Raises InvalidInput."""
    parts = [_filled(part, input.query, input.texts[index], tokenizer) for part in template]
    tokens = sum(map(len, parts))
    excess = max(tokens - model.max_tokens, 0)
    if excess:
        if side_of(input.truncation) == "left":
            raise InvalidInput("truncation", "left: this model reads texts in a template, of which only the end is cut")
        number = next(number for number, part in enumerate(template) if isinstance(part, str) and "{document}" in part)
        part = str(template[number])
        first, second = (_filled(part, input.query, filler, tokenizer) for filler in _FILLERS)
        pairs = zip(first[::-1], second[::-1], strict=False)
        behind = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        before = len(_filled(part.partition("{document}")[0], input.query, "", tokenizer))
        kept_tokens = len(parts[number]) - excess - behind
        if kept_tokens <= before:
            around = tokens - len(parts[number]) + before + behind
            reason = f"{around} tokens in the model's template: the query leaves no room for a text, the limit is"
            raise InvalidInput("query", f"{reason} {model.token_limit}")
        if or_default(input.truncation) == Truncation.TRUNCATION_ERROR:
            raise too_long(f"query and texts[{index}]", tokens, model)
        parts[number] = np.concatenate([parts[number][:kept_tokens], first[len(first) - behind :]])
    return Encoded([{"input_ids": np.concatenate(parts)}], truncated_tokens=excess)


def _filled(part: Sequence[int] | str, query: str, document: str, tokenizer: TextTokenizer) -> TokenIds:
    """Encodes a part of a template, int32 [tokens]."""
    if not isinstance(part, str):
        return np.array(part, np.int32)
    return tokenizer.tokens(part.format(query=query, document=document), special_tokens=False).token_ids


def decode(input: RerankInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> RerankResult:
    """Returns the best texts by each sequence's `logits`, float32 [1], or by the vectors of the query and each text."""
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


traits = traits_of("query", "truncation", "texts")
TASK = Task("rerank", check, traits, encode, decode, ("top_n", "function"), RerankFacts)
