"""Hugging Face's inference API for every task."""

import sys
from functools import partial
from typing import Any

from neuronpipe.core.errors import InvalidInput, WrongTask
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import check_body, read_json, write_body
from neuronpipe.doors.http.exchange import JSON, Answers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.huggingface_bodies import TextGeneration
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS, AnyBody
from neuronpipe.doors.http.huggingface_texts import answer_tokens
from neuronpipe.doors.http.problems import TGI_ERROR
from neuronpipe.doors.inference import Inference, Inputs, of_results

# Hugging Face's words for tasks → the tasks, in the order in which a model is asked for them.
_TASKS: dict[str, list[str]] = {}
for _task_name, _converter in CONVERTERS.items():
    for _word in _converter.task_names or (_task_name.replace("_", "-"),):
        _TASKS.setdefault(_word, []).append(_task_name)
# Fields of `inputs` that only one task has.
_TELLING_INPUTS = {"source_sentence": "sentence_similarity", "question": "question_answering", "query": "rerank"}
IMAGES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")

# Makes a route whose body depends on the model's task.
post = partial(Route, "POST", takes=AnyBody, gives=Any, error_form=TGI_ERROR, is_raw=True, takes_media=IMAGES)
MODEL_PARAMETER = {"model": "the model, where several have a task"}
MODEL = post("/models/{name}", "Hugging Face: the model's task")
MODEL_TASK = post("/models/{name}/pipeline/{task}", "Hugging Face: one of the model's tasks")
TASK_MODEL = post("/pipeline/{task}/{name}", "Hugging Face: one of the model's tasks")
ROOT = post("/", "Hugging Face: an endpoint of one model", query=MODEL_PARAMETER)


async def _model(inference: Inference, request: HttpRequest) -> HttpResponse:
    return await answer_request(inference, request, inference.spec(request.model(request.names["name"])))


async def _model_task(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /models/NAME/pipeline/TASK. Raises WrongTask if the model does not have the task."""
    spec, word = inference.spec(request.model(request.names["name"])), request.names["task"]
    for task in _TASKS.get(word, ()):
        if task in spec.tasks:
            return await answer_request(inference, request, spec, task)
    words = [theirs for theirs, ours in _TASKS.items() if any(task in spec.tasks for task in ours)]
    raise WrongTask(f"model {spec.name!r} does not have the task of the path; it has: {', '.join(words)}")


async def _root(inference: Inference, request: HttpRequest) -> HttpResponse:
    return await answer_request(inference, request, inference.spec(inference.choose(request.model())))


ANSWERS: Answers[Inference] = [(MODEL, _model), (MODEL_TASK, _model_task), (TASK_MODEL, _model_task), (ROOT, _root)]


async def answer_request(inference: Inference, request: HttpRequest, model: ModelSpec, task: str = "") -> HttpResponse:
    """Answers a body that is JSON or a file, with events if the body asks for a stream."""

    def read() -> Any:
        if request.media_type in IMAGES or (not request.media_type and not request.body.lstrip().startswith(b"{")):
            return {"inputs": request.body}  # the bytes of an image
        return read_json(request.body, sys.maxsize if model.image else inference.settings.max_input_bytes)

    value = await request.make(read)
    if (task or model.task) == "text_generation" and isinstance(value, dict) and value.get("stream"):
        body: TextGeneration = check_body(CONVERTERS["text_generation"].takes, value)
        if not isinstance(body.inputs, str):
            raise InvalidInput("inputs", "a stream takes one text")
        return await answer_tokens(inference, request, model, body, body.inputs)
    return HttpResponse(write_body(await answer_body(inference, request, model, value, task)))


async def answer_body(inference: Inference, request: HttpRequest, model: ModelSpec, value: Any, task: str = "") -> Any:
    """Returns the answer of a model to a body, or a list with the answer to each input."""
    task = task or _task_of(model, value)
    if task not in CONVERTERS:
        word = task.replace("_", "-")
        raise WrongTask(f"model {model.name!r} is for {word}, which has no form of Hugging Face here; use gRPC")
    converter = CONVERTERS[task]
    image = value.get("inputs") if isinstance(value, dict) else None
    if isinstance(image, bytes):
        if model.image is None:
            raise InvalidInput("content-type", f"must be {JSON}; model {model.name!r} takes no images")
        value = {"inputs": ""}
    body = check_body(converter.takes, value)
    body_inputs = image if isinstance(image, bytes) else body.inputs
    is_list = isinstance(body_inputs, list)
    values = body_inputs if is_list else [body_inputs]
    fields = {**converter.fields, **converter.option_fields(body)}
    inputs = Inputs(
        "inputs",
        values,
        lambda value: converter.read(task, value, body, model),
        fields,
        is_list,
        bypasses_cache=body.bypasses_cache,
    )
    results = await inference.each(request.call, request.model(model.name), inputs)

    def make() -> Any:
        pairs = zip(results, values, strict=True)
        answers = [converter.write_answer(getattr(result.result.message, task), value, body) for result, value in pairs]
        return answers if is_list or converter.is_nested else answers[0]

    return await of_results(results, make)


def _task_of(model: ModelSpec, value: Any) -> str:
    """Returns the model's own task, unless the body is for another task of the model."""
    if not isinstance(value, dict):
        return model.task
    inputs, parameters = value.get("inputs"), value.get("parameters")
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, dict):
        for name, task in _TELLING_INPUTS.items():
            if first.get(name) is not None and task in model.tasks:
                return task
    has_labels = isinstance(parameters, dict) and parameters.get("candidate_labels") is not None
    if has_labels and "zero_shot_classification" in model.tasks:
        return "zero_shot_classification"
    return model.task
