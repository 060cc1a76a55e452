"""Reranking, as Cohere, Jina and TEI have it."""

from typing import Annotated, Any

from pydantic import AliasChoices, Discriminator, Field, Tag

from neuronpipe.api.v1.tasks_pb2 import RerankInput, RerankResult, ScoreFunction, TaskInput
from neuronpipe.doors.http.bodies import Answer, Body, Direction, KeptTokens, Many, Whole, only, write_body
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import COHERE_ERROR, TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, kept_tokens, truncation_of
from neuronpipe.gateway.inference import InferenceResult

_DOCUMENTS, _TEI_FIELDS = {"texts": "documents"}, {"truncation": "truncate"}


class Document(Answer):
    """`text` is compared, other fields are ignored."""

    text: str


class CohereRerank(Body):
    """Long documents lose their ends, as they do there; `usage.truncated_tokens` says how much."""

    model: str | None = None
    query: str
    documents: Many[str | Document]
    top_n: Whole | None = Field(
        None,
        validation_alias=AliasChoices("top_n", "top_k"),
        description="how many, Voyage's top_k; default, and of 0: all",
    )
    return_documents: bool | None = Field(None, description="whether results have the documents; default: no")
    truncate_prompt_tokens: KeptTokens | None = Field(None, description="vLLM's: of the query and a document")
    truncation: bool | None = Field(None, description="Voyage's; false: a pair that is too long is an error")
    # The defaults of Cohere, vLLM and Infinity, which some clients send.
    max_tokens_per_doc: Annotated[Any, only(4096)] = None
    max_chunks_per_doc: Annotated[Any, only(10)] = None
    rank_fields: Annotated[Any, only(["text"])] = None
    use_activation: Annotated[Any, only(True)] = None
    raw_scores: Annotated[Any, only(False)] = None


class TeiRerank(Body):
    model: str | None = None
    query: str
    texts: Many[str]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    raw_scores: bool = False
    return_text: bool = False


class CohereRank(Answer):
    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int


class CohereRanks(Answer):
    id: str
    model: str
    results: list[CohereRank]
    usage: RerankUsage
    meta: dict[str, Any]


class TeiRank(Answer):
    index: int
    score: float
    text: str | None = None


def _kind(body: Any) -> str:
    is_cohere = "documents" in body if isinstance(body, dict) else isinstance(body, CohereRerank)
    return "cohere" if is_cohere else "tei"


_EITHER = Annotated[
    Annotated[TeiRerank, Tag("tei")] | Annotated[CohereRerank, Tag("cohere")],
    Discriminator(_kind),
    Field(description="with `texts` it is TEI's, with `documents` Jina's"),
]
V1 = Route("POST", "/v1/rerank", "Cohere, Jina: documents, best first", CohereRerank, CohereRanks, COHERE_ERROR)
V2 = Route("POST", "/v2/rerank", "Cohere: documents, best first", CohereRerank, CohereRanks, COHERE_ERROR)
PLAIN = Route("POST", "/rerank", "TEI, Jina: texts, best first", _EITHER, list[TeiRank] | CohereRanks, TEI_ERROR)


def rerank_handlers(inference: Inference, models: ModelChoice) -> HttpHandlers:
    """The routes with their handlers."""

    async def cohere(request: HttpRequest) -> HttpResponse:
        body: CohereRerank = request.body
        model = models.choose(request.model(body.model), "rerank")
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        # A client may ask for more than there are.
        top_n = min(body.top_n or 0, len(texts))
        cuts = kept_tokens(None if body.truncation is False else body.truncate_prompt_tokens or -1, None)
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

    return [(V1, cohere), (V2, cohere), (PLAIN, plain)]


def _ranked(result: InferenceResult) -> RerankResult:
    return result.result.message.rerank
