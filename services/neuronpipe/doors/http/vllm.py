"""vLLM's own paths for models that do not generate: scores of pairs, classes of texts, and what a model's head gives.

They take texts; vLLM's also take chats, images and token ids.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasChoices, Field

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    MultiVectorEmbeddingInput,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
)
from neuronpipe.core.errors import InvalidInput, WrongTask
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import Answer, Body, Count, KeptTokens, Many, only, texts_of, write_body
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Fields, Inference, ModelChoice, ModelName, kept_tokens, of_results
from neuronpipe.doors.vectors import token_vectors, vector
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import InferenceResult

_CUTS = dict.fromkeys(("truncation", "truncation_tokens"), "truncate_prompt_tokens")
_TOKEN_TASKS = ("multi_vector_embedding", "feature_extraction")
# By vLLM's words: the tasks that may answer, in the order in which a model is asked for them.
_POOLING: Mapping[str, Sequence[str]] = {
    "embed": ("sentence_embedding",),
    "classify": ("text_classification",),
    "token_embed": _TOKEN_TASKS,
}
_ANY_POOLING = [task for tasks in _POOLING.values() for task in tasks]


class _Pooled(Body):
    """Fields of every body. A text that is too long is an error without `truncate_prompt_tokens`."""

    model: str | None = None
    truncate_prompt_tokens: KeptTokens | None = Field(None, description="of a text; -1: as many as the model takes")
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = Field(None, description="false: logits, or vectors of their own length")
    add_special_tokens: Annotated[Any, only(True)] = None

    @property
    def cuts(self) -> dict[str, Any]:
        """In our words."""
        return kept_tokens(self.truncate_prompt_tokens, self.truncation_side)

    @property
    def function(self) -> "ScoreFunction.ValueType":
        """The function of the model, unless logits are wanted."""
        is_raw = self.use_activation is False
        return ScoreFunction.SCORE_FUNCTION_NONE if is_raw else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED


class Score(_Pooled):
    """One text with each of several, or texts in pairs. Later versions of vLLM call them queries and documents."""

    text_1: str | Many[str] = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Many[str] = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class Classify(_Pooled):
    input: str | Many[str]


class Pooling(_Pooled):
    input: str | Many[str]
    task: Literal["embed", "classify", "token_embed"] | None = Field(None, description="default: the model's own")
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] = "float"


class _Usage(Answer):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class _Answer(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: _Usage


class ScoredPair(Answer):
    index: int
    object: Literal["score"]
    score: float


class Scores(_Answer):
    data: list[ScoredPair]


class Classified(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(_Answer):
    data: list[Classified]


class PooledData(Answer):
    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class Pools(_Answer):
    data: list[PooledData]


def _post(path: str, summary: str, takes: Any, gives: Any) -> Route:
    return Route("POST", path, f"vLLM: {summary}", takes, gives, OPENAI_ERROR)


SCORE, V1_SCORE = (_post(path, "scores of pairs of texts", Score, Scores) for path in ("/score", "/v1/score"))
CLASSIFY = _post("/classify", "the labels of texts", Classify, Classes)
POOLING = _post("/pooling", "vectors or probabilities, as the model's head gives them", Pooling, Pools)


def vllm_handlers(inference: Inference, models: ModelChoice, catalog: Catalog) -> HttpHandlers:
    """The routes with their handlers."""

    async def each(
        request: HttpRequest, model: ModelName, make: Callable[[str], TaskInput]
    ) -> Sequence[InferenceResult]:
        given = request.body.input

        def fields(index: int) -> Fields:
            return {"text": f"input[{index}]" if isinstance(given, list) else "input"} | _CUTS

        return await inference.each(request.call, model, texts_of(given), make, "input", fields)

    async def score(request: HttpRequest) -> HttpResponse:
        body: Score = request.body
        model = models.choose(request.model(body.model), "rerank")
        makes = _ranked if catalog.spec(*model).answers("rerank") else _compared
        results = await inference.each(
            request.call, model, _pairs(body), partial(makes, body), "text_2", partial(_pair_fields, body)
        )
        scores = [_score_of(one.result.message) for one in results]
        data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
        return HttpResponse(write_body(_answer("score", request, model, results) | {"data": data}))

    async def classify(request: HttpRequest) -> HttpResponse:
        body: Classify = request.body
        model = models.choose(request.model(body.model), "text_classification")
        spec = catalog.spec(*model)
        results = await each(request, model, partial(_classified, body, spec))
        data = []
        for index, one in enumerate(results):
            probabilities = _probabilities(one.result.message, spec)
            label = one.result.message.text_classification.labels[0].label
            data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
        return HttpResponse(write_body(_answer("classify", request, model, results) | {"data": data}))

    async def pooling(request: HttpRequest) -> HttpResponse:
        body: Pooling = request.body
        model = models.choose(request.model(body.model))
        spec = catalog.spec(*model)
        task = _pooling_task(body, spec)
        if body.dimensions and task != "sentence_embedding":
            raise InvalidInput("dimensions", "is for models of sentence embeddings")
        results = await each(request, model, partial(_pooled, body, task, spec))

        def write() -> bytes:
            arrays = [_array(task, one.result.message, spec) for one in results]
            if body.encoding_format == "base64":
                arrays = [b64encode(_float32(one)).decode() for one in arrays]
            data = [{"index": index, "object": "pooling", "data": one} for index, one in enumerate(arrays)]
            return write_body(_answer("pool", request, model, results) | {"data": data})

        return HttpResponse(await of_results(results, write), is_compressible=body.encoding_format != "base64")

    return [(SCORE, score), (V1_SCORE, score), (CLASSIFY, classify), (POOLING, pooling)]


def _pairs(body: Score) -> list[tuple[str, str]]:
    """Raises InvalidInput."""
    first, second = texts_of(body.text_1), texts_of(body.text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidInput("text_2", f"{len(second)} texts, must be as many as text_1 has, {len(first)}")
    return list(zip(first, second, strict=True))


def _pair_fields(body: Score, index: int) -> Fields:
    first, second = (
        f"{name}[{index}]" if isinstance(texts, list) and texts[1:] else name
        for name, texts in (("text_1", body.text_1), ("text_2", body.text_2))
    )
    pair = f"{first} and {second}"
    names = {"query": first, "source": first, "texts[0]": second}
    return names | {"query and texts[0]": pair, "query and texts": pair} | _CUTS


def _ranked(body: Score, pair: tuple[str, str]) -> TaskInput:
    query, text = pair
    return TaskInput(rerank=RerankInput(query=query, texts=[text], function=body.function, **body.cuts))


def _compared(body: Score, pair: tuple[str, str]) -> TaskInput:
    source, text = pair
    input = SentenceSimilarityInput(source=source, texts=[text], **body.cuts)
    return TaskInput(sentence_similarity=input)


def _score_of(result: TaskResult) -> float:
    if result.HasField("rerank"):
        return result.rerank.texts[0].score
    return result.sentence_similarity.scores[0]


def _classified(body: _Pooled, spec: ModelSpec, text: str) -> TaskInput:
    input = TextClassificationInput(text=text, top_k=len(spec.labels), function=body.function, **body.cuts)
    return TaskInput(text_classification=input)


def _probabilities(result: TaskResult, spec: ModelSpec) -> list[float]:
    """In the order of the model's labels."""
    scores = {one.label: one.score for one in result.text_classification.labels}
    return [scores[label] for label in spec.labels]


def _pooling_task(body: Pooling, spec: ModelSpec) -> str:
    """Raises WrongTask for a model that has none of those that are asked for."""
    wanted = _POOLING[body.task] if body.task else [spec.task, *_ANY_POOLING]
    for task in wanted:
        if task in _ANY_POOLING and task in spec.tasks:
            return task
    raise WrongTask(f"model {spec.name!r} has the task {' or '.join(spec.tasks)}, which /pooling does not give")


def _pooled(body: Pooling, task: str, spec: ModelSpec, text: str) -> TaskInput:
    if task == "text_classification":
        return _classified(body, spec, text)
    if task == "multi_vector_embedding":
        return TaskInput(multi_vector_embedding=MultiVectorEmbeddingInput(text=text, **body.cuts))
    if task == "feature_extraction":
        return TaskInput(feature_extraction=FeatureExtractionInput(text=text, **body.cuts))
    options: dict[str, Any] = {"dimensions": body.dimensions or 0, "skip_normalize": body.use_activation is False}
    return TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, **body.cuts, **options))


def _array(task: str, result: TaskResult, spec: ModelSpec) -> Any:
    if task == "text_classification":
        return _probabilities(result, spec)
    if task == "sentence_embedding":
        return vector(result.sentence_embedding)
    return token_vectors(getattr(result, task))


def _float32(numbers: Any) -> bytes:
    return np.asarray(numbers, "<f4").tobytes()


def _answer(kind: str, request: HttpRequest, model: ModelName, results: Sequence[InferenceResult]) -> dict[str, Any]:
    tokens = sum(one.usage.tokens for one in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    head = {"id": f"{kind}-{request.call.request_id}", "object": "list", "created": int(time())}
    return head | {"model": model.name, "usage": usage}
