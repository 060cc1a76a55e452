"""Reranking, as Cohere, Jina and TEI have it."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NotRequired

from pydantic import AliasChoices, ConfigDict, Field

from neuronpipe.api.v1.tasks_pb2 import RerankInput, TaskInput
from neuronpipe.core.model import with_fields
from neuronpipe.doors.http.aliases import AliasedBody
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, Count, Direction, KeptTokens, Many, ModelBody, Whole, either, fixed
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import COHERE_ERROR, TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelCall, cut_fields, score_function, truncation_of


class Document(Body):
    """A document. Only its `text` is compared; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    text: str


# Some clients send the defaults of Cohere, vLLM and Infinity.
@with_fields(fixed(rank_fields=["text"], use_activation=True, raw_scores=False))
class CohereRerank(AliasedBody):
    """Long documents lose their ends, as with Cohere, or are read in chunks; `usage.truncated_tokens` says how much."""

    query: str
    documents: Many[str | Document]
    top_n: Whole | None = Field(
        None,
        validation_alias=AliasChoices("top_n", "top_k"),
        description="number of results (default, also for 0: all documents); Voyage's name: top_k",
    )
    max_tokens_per_doc: Count | None = Field(None, description="Cohere's: tokens of each document that are read")
    max_chunks_per_doc: Count | None = Field(
        None, description="Cohere's, Jina's: the most chunks of a long document, which has the score of its best"
    )
    return_documents: bool | None = Field(None, description="whether results have the documents; default: no")
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="vLLM's: tokens that are kept of the query and a document"
    )
    truncation: bool | None = Field(None, description="Voyage's; false: a pair that is too long is an error")

    @property
    def is_voyages(self) -> bool:
        """Whether the request has a field of Voyage, whose clients read `data`."""
        return not self.sent_names.isdisjoint({"truncation", "top_k"})

    @property
    def may_be_voyages(self) -> bool:
        """Whether the request has only fields that Voyage has too."""
        return self.sent_names <= {"model", "query", "documents", "return_documents", "truncation", "top_k"}


class TeiRerank(ModelBody):
    query: str
    texts: Many[str]
    top_n: Whole | None = Field(None, description="LiteLLM's: number of results (default, also for 0: all texts)")
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False
    return_text: bool = False


_USAGE = named("RerankUsage", prompt_tokens=int, total_tokens=int, truncated_tokens=int)
_RANK: Any = named("CohereRank", index=int, relevance_score=float, document=NotRequired[Document | None])
_VOYAGE_RANK: Any = named("VoyageRank", index=int, relevance_score=float, document=NotRequired[str | None])
_COHERE: Any = named(
    "CohereRanks",
    id=str,
    model=str,
    results=NotRequired[list[_RANK]],
    data=NotRequired[list[_VOYAGE_RANK]],
    object=NotRequired[Literal["list"]],
    usage=_USAGE,
    meta=dict[str, Any],
)
_TEI_RANK: Any = named("TeiRank", index=int, score=float, text=NotRequired[str | None])
# Cohere bills a search unit for a query with up to 100 documents.
_UNIT_DOCUMENTS = 100
_FIELDS = {"texts": "documents", "max_chunks": "max_chunks_per_doc", "max_text_tokens": "max_tokens_per_doc"}
_EITHER = either(TeiRerank, CohereRerank, {"documents"}, "TEI's with `texts`, Jina's with `documents`")
_post = partial(Route, "POST")
V1 = _post("/v1/rerank", "Cohere, Jina: documents, best first", CohereRerank, _COHERE, COHERE_ERROR)
V2 = _post("/v2/rerank", "Cohere: documents, best first", CohereRerank, _COHERE, COHERE_ERROR)
PLAIN = _post("/rerank", "TEI, Jina: texts, best first", _EITHER, list[_TEI_RANK] | _COHERE, TEI_ERROR)


async def cohere(inference: Inference, request: HttpRequest, *, is_voyages_path: bool = False) -> HttpResponse:
    """Answers POST /v2/rerank, and /v1/rerank, which is also Voyage's path."""
    body: CohereRerank = request.body
    model = inference.choose(request.model(body.model), "rerank")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    top_n = min(body.top_n or 0, len(texts))  # a client may ask for more than there are
    cuts: dict[str, Any] = {"truncation": truncation_of(body.truncation, None)}
    is_left_open = body.truncation is None and body.truncate_prompt_tokens is None
    if body.truncation is not False and not (is_left_open and inference.settings.long_texts == "chunks"):
        cuts = cut_fields(body.truncate_prompt_tokens or -1, None)
    cuts |= {"max_chunks": body.max_chunks_per_doc or 0, "max_text_tokens": body.max_tokens_per_doc or 0}
    input = TaskInput(rerank=RerankInput(query=body.query, texts=texts, top_n=top_n, **cuts))
    fields = _FIELDS | {"truncation": "truncation"} if body.truncation is False else _FIELDS
    result = await inference.infer_one(ModelCall(request.call, model, fields), input)
    results: list[dict[str, Any]] = [
        {"index": rank.index, "relevance_score": rank.score} for rank in result.result.message.rerank.texts
    ]
    forms: dict[str, Any] = {}
    if not body.is_voyages:
        forms["results"] = _with_documents(results, [{"text": text} for text in texts] if body.return_documents else [])
    if body.is_voyages or (is_voyages_path and body.may_be_voyages):
        forms |= {"object": "list", "data": _with_documents(results, texts if body.return_documents else [])}
    usage = dict.fromkeys(("prompt_tokens", "total_tokens"), result.usage.tokens)
    answer = {
        "id": request.call.request_id,
        "model": model.name,
        **forms,
        "usage": usage | {"truncated_tokens": result.usage.truncated_tokens},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": -(-len(texts) // _UNIT_DOCUMENTS)}},
    }
    return HttpResponse(write_body(answer))


def _with_documents(results: list[dict[str, Any]], documents: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the results, each with its document unless there are none."""
    return [rank | {"document": documents[rank["index"]]} for rank in results] if documents else results


async def _plain(inference: Inference, request: HttpRequest) -> HttpResponse:
    if isinstance(request.body, CohereRerank):
        return await cohere(inference, request)
    body: TeiRerank = request.body
    input = RerankInput(
        query=body.query,
        texts=body.texts,
        top_n=min(body.top_n or 0, len(body.texts)),
        function=score_function(body.raw_scores),
        truncation=truncation_of(body.truncate, body.truncation_direction),
    )
    model = inference.choose(request.model(body.model), "rerank")
    model_call = ModelCall(request.call, model, {"truncation": "truncate"})
    result = await inference.infer_one(model_call, TaskInput(rerank=input))
    answer: list[dict[str, Any]] = [
        {"index": rank.index, "score": rank.score} for rank in result.result.message.rerank.texts
    ]
    if body.return_text:
        for rank in answer:
            rank["text"] = body.texts[rank["index"]]
    return HttpResponse(write_body(answer))


ANSWERS: Answers[Inference] = [(V1, partial(cohere, is_voyages_path=True)), (V2, cohere), (PLAIN, _plain)]
