"""Hugging Face's inference API for every task."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from neuronpipe.core.errors import InvalidInput, WrongTask
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import check_body, read_json, write_body
from neuronpipe.doors.http.exchange import JSON, HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.huggingface_bodies import AnyBody, TextGeneration
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS
from neuronpipe.doors.http.huggingface_texts import answer_tokens
from neuronpipe.doors.http.problems import TGI_ERROR, ErrorForm
from neuronpipe.doors.inference import Inference, ModelChoice, of_results
from neuronpipe.gateway.catalog import Catalog

# Hugging Face's words for tasks → the tasks, in the order in which a model is asked for them.
_TASKS: dict[str, list[str]] = {}
for _task_name, _converter in CONVERTERS.items():
    for _word in _converter.words or (_task_name.replace("_", "-"),):
        _TASKS.setdefault(_word, []).append(_task_name)
# A field of `inputs` that only one task has.
_TELLING_INPUTS = {"source_sentence": "sentence_similarity", "question": "question_answering", "query": "rerank"}
IMAGES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")


def post(path: str, summary: str, media: Sequence[str], error_form: ErrorForm = TGI_ERROR, **fields: Any) -> Route:
    """A route that takes what a model's task takes."""
    return Route("POST", path, summary, AnyBody, Any, error_form, is_raw=True, takes_media=media, **fields)


MODEL_PARAMETER = {"model": "the model, where several have a task"}
MODEL = post("/models/{name}", "Hugging Face: what the model is for", IMAGES)
MODEL_TASK = post("/models/{name}/pipeline/{task}", "Hugging Face: one of the model's tasks", IMAGES)
TASK_MODEL = post("/pipeline/{task}/{name}", "Hugging Face: one of the model's tasks", IMAGES)
ROOT = post("/", "Hugging Face: an endpoint of one model", IMAGES, query=MODEL_PARAMETER)


def huggingface_handlers(inference: Inference, models: ModelChoice, catalog: Catalog) -> HttpHandlers:
    """The routes with their handlers."""

    async def model(request: HttpRequest) -> HttpResponse:
        return await answer_request(inference, request, catalog.spec(*request.model(request.names["name"])))

    async def task(request: HttpRequest) -> HttpResponse:
        spec = catalog.spec(*request.model(request.names["name"]))
        return await answer_request(inference, request, spec, _task(spec, request.names["task"]))

    async def root(request: HttpRequest) -> HttpResponse:
        return await answer_request(inference, request, catalog.spec(*models.choose(request.model())))

    return [(MODEL, model), (MODEL_TASK, task), (TASK_MODEL, task), (ROOT, root)]


def read_request(request: HttpRequest, model: ModelSpec, max_input_bytes: int) -> Any:
    """The body as a value; the value of an image holds its bytes."""
    if request.media_type in IMAGES or (not request.media_type and not request.body.lstrip().startswith(b"{")):
        return {"inputs": request.body}
    return read_json(request.body, sys.maxsize if model.image else max_input_bytes)


async def answer_request(inference: Inference, request: HttpRequest, model: ModelSpec, task: str = "") -> HttpResponse:
    """The answer of a model to a body that is JSON or a file, as events where the body asks for a stream."""
    value = await request.make(partial(read_request, request, model, inference.max_input_bytes))
    if (task or model.task) == "text_generation" and isinstance(value, dict) and value.get("stream"):
        body: TextGeneration = check_body(CONVERTERS["text_generation"].takes, value)
        if not isinstance(body.inputs, str):
            raise InvalidInput("inputs", "a stream takes one text")
        return await answer_tokens(inference, request, model, body, body.inputs)
    return HttpResponse(write_body(await answer_body(inference, request, model, value, task)))


async def answer_body(inference: Inference, request: HttpRequest, model: ModelSpec, value: Any, task: str = "") -> Any:
    """The answer of a model to a body: one answer, or a list with the answer of each input."""
    found = task or _task_of(model, value)
    if found not in CONVERTERS:
        word = found.replace("_", "-")
        raise WrongTask(f"model {model.name!r} is for {word}, which has no form of Hugging Face here; use gRPC")
    converter = CONVERTERS[found]
    image = value.get("inputs") if isinstance(value, dict) else None
    if isinstance(image, bytes):
        if model.image is None:
            raise InvalidInput("content-type", f"must be {JSON}; model {model.name!r} takes no images")
        value = {"inputs": ""}
    body = check_body(converter.takes, value)
    inputs = image if isinstance(image, bytes) else body.inputs
    is_list = isinstance(inputs, list)
    several = inputs if is_list else [inputs]
    names = {**converter.fields, **converter.option_fields(body)}

    def fields(index: int) -> dict[str, str]:
        return {ours: theirs.replace("…", f"[{index}]" if is_list else "") for ours, theirs in names.items()}

    results = await inference.each(
        request.call,
        request.model(model.name),
        several,
        lambda one: converter.read(one, body, model),
        "inputs",
        fields,
    )

    def made() -> Any:
        answers = [converter.write(one.result.message, own, body) for one, own in zip(results, several, strict=True)]
        return answers if is_list or converter.is_nested else answers[0]

    return await of_results(results, made)


def _task(model: ModelSpec, word: str) -> str:
    """The model's task that Hugging Face calls so. Raises WrongTask."""
    for task in _TASKS.get(word, ()):
        if task in model.tasks:
            return task
    words = [theirs for theirs, ours in _TASKS.items() if any(task in model.tasks for task in ours)]
    raise WrongTask(f"model {model.name!r} does not have the task of the path; it has: {', '.join(words)}")


def _task_of(model: ModelSpec, value: Any) -> str:
    """The model's own task, unless the body is one of another that it has."""
    inputs = value.get("inputs") if isinstance(value, dict) else None
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, dict):
        for name, task in _TELLING_INPUTS.items():
            if first.get(name) is not None and task in model.tasks:
                return task
    parameters = value.get("parameters") if isinstance(value, dict) else None
    has_labels = isinstance(parameters, dict) and parameters.get("candidate_labels") is not None
    if has_labels and "zero_shot_classification" in model.tasks:
        return "zero_shot_classification"
    return model.task
