"""Reranking, as Cohere, Jina and TEI have it."""

from typing import Annotated, Any

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import RerankInput, RerankResult, ScoreFunction, TaskInput
from neuronpipe.doors.http.bodies import Body, Direction, KeptTokens, Many, Unsupported, Whole, write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import COHERE_ERROR, TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, kept_tokens, truncation_of
from neuronpipe.gateway.inference import InferenceResult

_DOCUMENTS, _TEI_FIELDS = {"texts": "documents"}, {"truncation": "truncate"}


class Document(Body):
    """`text` is compared, other fields are ignored."""

    text: str


class CohereRerank(Body):
    """Long documents lose their ends, as they do there; `usage.truncated_tokens` says how much."""

    model: str | None = None
    query: str
    documents: Many[str | Document]
    top_n: Whole | None = Field(None, description="how many; default, and of 0: all")
    return_documents: bool | None = Field(None, description="whether results have the documents; default: no")
    truncate_prompt_tokens: KeptTokens | None = Field(None, description="vLLM's: of the query and a document")
    max_tokens_per_doc: Unsupported = None
    max_chunks_per_doc: Unsupported = None
    rank_fields: Unsupported = None


class TeiRerank(Body):
    model: str | None = None
    query: str
    texts: Many[str]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False
    return_text: bool = False


class CohereRank(Body):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(Body):
    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int


class CohereRanks(Body):
    id: str
    model: str
    results: list[CohereRank]
    usage: RerankUsage
    meta: dict[str, Any]


class TeiRank(Body):
    index: int
    score: float
    text: str | None = None


_EITHER = Annotated[TeiRerank | CohereRerank, Field(description="with `texts` it is TEI's, with `documents` Jina's")]
V1 = Route("POST", "/v1/rerank", "Cohere, Jina: documents, best first", CohereRerank, CohereRanks, COHERE_ERROR)
V2 = Route("POST", "/v2/rerank", "Cohere: documents, best first", CohereRerank, CohereRanks, COHERE_ERROR)
PLAIN = Route("POST", "/rerank", "TEI, Jina: texts, best first", _EITHER, list[TeiRank] | CohereRanks, TEI_ERROR)
ROUTES = (V1, V2, PLAIN)


def rerank_handlers(inference: Inference, models: ModelChoice) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def cohere(request: HttpRequest) -> HttpResponse:
        body: CohereRerank = request.body
        model = models.choose(request.model(body.model), "rerank")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        # A client may ask for more than there are.
        top_n = min(body.top_n or 0, len(texts))
        cuts = kept_tokens(body.truncate_prompt_tokens or -1, None)
        input = RerankInput(query=body.query, texts=texts, top_n=top_n, **cuts)
        result = await inference.one(request.call, model, TaskInput(rerank=input), _DOCUMENTS)
        results: list[dict[str, Any]] = [
            {"index": one.index, "relevance_score": one.score} for one in _ranked(result).texts
        ]
        if body.return_documents:
            for one in results:
                one["document"] = {"text": texts[one["index"]]}
        usage = result.usage
        answer = {
            "id": request.call.request_id,
            "model": model.name,
            "results": results,
            "usage": {
                "prompt_tokens": usage.tokens,
                "total_tokens": usage.tokens,
                "truncated_tokens": usage.truncated_tokens,
            },
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }
        return HttpResponse(write_body(answer))

    async def plain(request: HttpRequest) -> HttpResponse:
        if isinstance(request.body, CohereRerank):
            return await cohere(request)
        body: TeiRerank = request.body
        input = RerankInput(
            query=body.query,
            texts=body.texts,
            function=ScoreFunction.SCORE_FUNCTION_NONE if body.raw_scores else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
            truncation=truncation_of(body.truncate, body.truncation_direction),
        )
        model = models.choose(request.model(body.model), "rerank")
        ranks = _ranked(await inference.one(request.call, model, TaskInput(rerank=input), _TEI_FIELDS)).texts
        texts = [{"text": body.texts[one.index]} if body.return_text else {} for one in ranks]
        return HttpResponse(
            write_body(
                [{"index": one.index, "score": one.score, **text} for one, text in zip(ranks, texts, strict=True)]
            )
        )

    return {V1.key: cohere, V2.key: cohere, PLAIN.key: plain}


def _ranked(result: InferenceResult) -> RerankResult:
    return result.result.message.rerank
