"""vLLM's own paths for models that do not generate: scores of pairs, classes of texts, and outputs of a model's head.

These paths take texts; vLLM's also take chats, images and token ids.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import time
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AliasChoices, Field

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.core.errors import InvalidInput, WrongTask
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.aliases import AliasedBody
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Count, KeptTokens, Many, only, texts_of
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, Inputs, ModelName, cut_fields, of_results, score_function
from neuronpipe.doors.vectors import text_input, token_vectors, vector
from neuronpipe.gateway.requests import InferenceResult

_CUTS = dict.fromkeys(("truncation", "truncation_tokens"), "truncate_prompt_tokens")
_TOKEN_TASKS = ("multi_vector_embedding", "feature_extraction")
# vLLM's words → the tasks that may answer, in the order in which a model is asked for them.
_POOLING: Mapping[str, Sequence[str]] = {
    "embed": ("sentence_embedding",),
    "classify": ("text_classification",),
    "token_embed": _TOKEN_TASKS,
}
_ANY_POOLING = [task for tasks_of_word in _POOLING.values() for task in tasks_of_word]


class _VllmBody(AliasedBody):
    """Fields of every body. A text that is too long is an error without `truncate_prompt_tokens`."""

    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="tokens that are kept of a text; -1: as many as the model takes"
    )
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = Field(None, description="false: logits, or vectors of their own length")
    add_special_tokens: Annotated[Any, only(True)] = None

    @property
    def cuts(self) -> dict[str, Any]:
        """The fields of a tasks.TaskInput that cut a text."""
        return cut_fields(self.truncate_prompt_tokens, self.truncation_side)

    @property
    def function(self) -> "tasks.ScoreFunction.ValueType":
        """The function of the model, unless the caller wants logits."""
        return score_function(self.use_activation is False)


class Score(_VllmBody):
    """A text with each of several texts, or texts in pairs. Later versions of vLLM call them queries and documents."""

    text_1: str | Many[str] = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Many[str] = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class Classify(_VllmBody):
    input: str | Many[str]


class Pooling(_VllmBody):
    input: str | Many[str]
    task: Literal["embed", "classify", "token_embed"] | None = Field(
        None, description="vLLM's word for the task (default: the model's own task)"
    )
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] = "float"


_USAGE = named("_Usage", prompt_tokens=int, total_tokens=int, completion_tokens=int)


def _list_of(name: str, item_name: str, **item: Any) -> Any:
    values: Any = named(item_name, index=int, **item)
    return named(name, id=str, object=Literal["list"], created=int, model=str, usage=_USAGE, data=list[values])


_SCORES = _list_of("Scores", "ScoredPair", object=Literal["score"], score=float)
_CLASSES = _list_of("Classes", "Classified", label=str, probs=list[float], num_classes=int)
_POOLS = _list_of("Pools", "PooledData", object=Literal["pooling"], data=list[list[float]] | list[float] | str)
_post = partial(Route, "POST", error_form=OPENAI_ERROR)
SCORE, V1_SCORE = (_post(path, "vLLM: scores of pairs of texts", Score, _SCORES) for path in ("/score", "/v1/score"))
CLASSIFY = _post("/classify", "vLLM: the labels of texts", Classify, _CLASSES)
POOLING = _post("/pooling", "vLLM: vectors or probabilities, as the model's head gives them", Pooling, _POOLS)


async def _score(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Score = request.body
    model = inference.choose(request.model(body.model), "rerank")
    first, second = texts_of(body.text_1), texts_of(body.text_2)
    first_name, second_name = map(body.sent_name, ("text_1", "text_2"))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidInput(second_name, f"{len(second)} texts, must be as many as {first_name} has, {len(first)}")
    ranks = inference.spec(model).answers("rerank")

    def make(pair: tuple[str, str]) -> tasks.TaskInput:
        options: dict[str, Any] = {"texts": pair[1:], **body.cuts}
        if ranks:
            input = tasks.RerankInput(query=pair[0], function=body.function, **options)
            return tasks.TaskInput(rerank=input)
        return tasks.TaskInput(sentence_similarity=tasks.SentenceSimilarityInput(source=pair[0], **options))

    pairs = list(zip(first, second, strict=True))
    results = await inference.each(request.call, model, Inputs(second_name, pairs, make, _pair_fields(body)))
    messages = [result.result.message for result in results]
    scores = [result.rerank.texts[0].score if ranks else result.sentence_similarity.scores[0] for result in messages]
    data = [{"index": index, "object": "score", "score": number} for index, number in enumerate(scores)]
    return HttpResponse(write_body(_answer("score", request, model, results, data)))


async def _classify(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Classify = request.body
    model = inference.choose(request.model(body.model), "text_classification")
    spec = inference.spec(model)
    results = await _each(inference, request, model, _classified(body, spec))
    data = []
    for index, result in enumerate(results):
        probabilities = _probabilities(result.result.message, spec)
        label = result.result.message.text_classification.labels[0].label
        data.append({"index": index, "label": label, "probs": probabilities, "num_classes": len(probabilities)})
    return HttpResponse(write_body(_answer("classify", request, model, results, data)))


async def _pooling(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Pooling = request.body
    model = inference.choose(request.model(body.model))
    spec = inference.spec(model)
    task = _pooling_task(body, spec)
    if body.dimensions and task != "sentence_embedding":
        raise InvalidInput("dimensions", "is for models of sentence embeddings")
    results = await _each(inference, request, model, _pooled(body, task, spec))
    is_base64 = body.encoding_format == "base64"

    def write() -> bytes:
        arrays = [_array(task, result.result.message, spec) for result in results]
        if is_base64:
            arrays = [b64encode(np.asarray(array, "<f4").tobytes()).decode() for array in arrays]
        data = [{"index": index, "object": "pooling", "data": array} for index, array in enumerate(arrays)]
        return write_body(_answer("pool", request, model, results, data))

    return HttpResponse(await of_results(results, write), is_compressible=not is_base64)


def _pair_fields(body: Score) -> dict[str, str]:
    first, second = (
        f"{body.sent_name(name)}…" if isinstance(texts, list) and texts[1:] else body.sent_name(name)
        for name, texts in (("text_1", body.text_1), ("text_2", body.text_2))
    )
    pair = f"{first} and {second}"
    names = {"query": first, "source": first, "texts[0]": second}
    return names | {"query and texts[0]": pair, "query and texts": pair} | _CUTS


async def _each(
    inference: Inference, request: HttpRequest, model: ModelName, make: Callable[[str], tasks.TaskInput]
) -> list[InferenceResult]:
    body_texts = request.body.input
    inputs = Inputs(
        "input", texts_of(body_texts), make, {"text": "input…"} | _CUTS, is_list=isinstance(body_texts, list)
    )
    return await inference.each(request.call, model, inputs)


def _classified(body: _VllmBody, spec: ModelSpec) -> Callable[[str], tasks.TaskInput]:
    return partial(text_input, "text_classification", top_k=len(spec.labels), function=body.function, **body.cuts)


def _probabilities(result: tasks.TaskResult, spec: ModelSpec) -> list[float]:
    """Returns the scores in the order of the model's labels."""
    scores = {label.label: label.score for label in result.text_classification.labels}
    return [scores[label] for label in spec.labels]


def _pooling_task(body: Pooling, spec: ModelSpec) -> str:
    """Returns the task of the model that answers.

    Raises InvalidInput if the model has none that the caller asks for, and WrongTask if it has none of this path.
    """
    wanted = _POOLING[body.task] if body.task else [spec.task, *_ANY_POOLING]
    for task in wanted:
        if task in _ANY_POOLING and task in spec.tasks:
            return task
    if body.task:
        raise InvalidInput("task", f"model {spec.name!r} has no task for {body.task}; it has: {', '.join(spec.tasks)}")
    tasks = " and ".join(spec.tasks).replace("_", "-")
    raise WrongTask(f"model {spec.name!r} supports {tasks}, which /pooling does not give")


def _pooled(body: Pooling, task: str, spec: ModelSpec) -> Callable[[str], tasks.TaskInput]:
    if task == "text_classification":
        return _classified(body, spec)
    options: dict[str, Any] = body.cuts
    if task == "sentence_embedding":
        options |= {"dimensions": body.dimensions or 0, "skip_normalize": body.use_activation is False}
    return partial(text_input, task, **options)


def _array(task: str, result: tasks.TaskResult, spec: ModelSpec) -> Any:
    if task == "text_classification":
        return _probabilities(result, spec)
    return vector(result.sentence_embedding) if task == "sentence_embedding" else token_vectors(getattr(result, task))


def _answer(
    kind: str, request: HttpRequest, model: ModelName, results: Sequence[InferenceResult], data: list[dict[str, Any]]
) -> dict[str, Any]:
    tokens = sum(result.usage.tokens for result in results)
    return {
        "id": f"{kind}-{request.call.request_id}",
        "object": "list",
        "created": int(time()),
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        "data": data,
    }


ANSWERS: Answers[Inference] = [(SCORE, _score), (V1_SCORE, _score), (CLASSIFY, _classify), (POOLING, _pooling)]
