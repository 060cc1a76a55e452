"""Reranking: sorts texts by how well they answer a query, as a cross-encoder scores them.

Equal to sentence-transformers' `CrossEncoder.rank` with `top_k` and `activation_fn`, except for texts with equal scores
there. If the sigmoid of several texts is 1.0 in float32, their logits decide the order here.

The score of a text in chunks is the score of its best chunk. `max_text_tokens` cuts texts as vLLM's
`max_tokens_per_doc`, to the characters of their first tokens.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import RankedText, RerankInput, RerankResult, ScoreFunction
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    EncodedText,
    Task,
    TextTokenizer,
    TokenIds,
    check_text,
    check_truncation,
    traits_of,
)
from neuronpipe.tasks.chunks import check_chunks, divide, encode_chunks, encoded_chunks
from neuronpipe.tasks.many_texts import PART, check_pairs, check_texts, join
from neuronpipe.tasks.multi_vector_embedding import MultiVectorFacts, encode_kind, kept_vectors, max_similarity
from neuronpipe.tasks.scores import ScoreFunctionName, check_function, scores_of


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
    check_chunks(input)


def encode(input: RerankInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the query and each text, or each of its chunks, behind the model's prompt, if any."""
    facts, cuts = RerankFacts.of(model), (input.truncation, input.max_chunks)
    texts = [_limited(text, input.max_text_tokens, tokenizer) for text in input.texts]

    def encode_part(index: int, text: str) -> Encoded:
        if facts.compares_tokens:
            return encode_kind(text, tokenizer, model, *cuts, f"texts[{index}]", is_query=False)
        name = f"query and texts[{index}]"
        if not facts.template:
            return encode_chunks(tokenizer, model, input.query, text, *cuts, name, facts.prompt)
        fill = partial(_fill, facts.template, input.query, tokenizer)
        chunks = divide(fill(text), fill, model, *cuts, name, "query")
        return encoded_chunks(chunks, [{"input_ids": chunk.token_ids} for chunk in chunks])

    documents = (encode_part(index, text) for index, text in enumerate(texts))
    if not facts.compares_tokens:
        return join(documents)
    return join(
        chain([encode_kind(input.query, tokenizer, model, input.truncation, 0, "query", is_query=True)], documents)
    )


def _limited(text: str, max_tokens: int, tokenizer: TextTokenizer) -> str:
    """Cuts a text to the characters of its first tokens; 0: to none."""
    if not max_tokens or len(text.encode()) <= max_tokens:  # a text rarely has more tokens than bytes
        return text
    ends = tokenizer.tokens(text, special_tokens=False).char_end
    return text if len(ends) <= max_tokens else text[: ends[max_tokens - 1]]


def _fill(template: Sequence[Sequence[int] | str], query: str, tokenizer: TextTokenizer, document: str) -> EncodedText:
    """Encodes a template with a query and a text."""

    def tokens_of(part: Sequence[int] | str) -> TokenIds:
        if not isinstance(part, str):
            return np.array(part, np.int32)
        return tokenizer.tokens(part.format(query=query, document=document), special_tokens=False).token_ids

    token_ids = np.concatenate([tokens_of(part) for part in template])
    return EncodedText(token_ids, np.zeros_like(token_ids))


def decode(input: RerankInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> RerankResult:
    """Returns the best texts by each sequence's `logits`, float32 [1], or by the vectors of the query and each text."""
    facts = RerankFacts.of(model)
    if facts.compares_tokens:
        query, *texts = map(kept_vectors, outputs)
        late = MultiVectorFacts.of(model)
        logits = np.array([max_similarity(query, text, late) for text in texts], np.float32)
    else:
        logits = np.concatenate([output["logits"] for output in outputs])
    if annotations:
        parts = np.concatenate([sequence[PART] for sequence in annotations[-len(logits) :]])
        logits = np.maximum.reduceat(logits, np.flatnonzero(np.diff(parts, prepend=-1)))
    scores = scores_of(logits, input.function, facts.score_function).tolist()
    # Equal texts stay in the order of the request.
    order = np.argsort(-logits, kind="stable")[: input.top_n or len(logits)]
    return RerankResult(texts=[RankedText(index=index, score=scores[index]) for index in order.tolist()])


traits = traits_of("query", "truncation", "max_chunks", "max_text_tokens", "texts")
_DECODED = "top_n", "function"
_PARTS = Annotations({PART: 1}, may_be_missing=True)
TASK = Task("rerank", check, traits, encode, decode, _DECODED, RerankFacts, _PARTS)
