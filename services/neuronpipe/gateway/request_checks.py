"""The checks of a request before anything is computed, the limit of its time, and its rule for long texts."""

import time

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, WrongTask
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import pack_body
from neuronpipe.gateway.requests import InferenceRequest
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.chunks import MAX_CHUNKS

_MAX_REQUEST_ID_LENGTH = 256
_PRIORITIES, _CACHE_CONTROLS = frozenset(Priority.values()), frozenset(CacheControl.values())


def check_fields(request: InferenceRequest) -> None:
    """Checks the fields except the input. Raises InvalidInput."""
    request_id = request.call.request_id
    if len(request_id) > _MAX_REQUEST_ID_LENGTH:
        raise InvalidInput("request_id", f"{len(request_id)} characters, the limit is {_MAX_REQUEST_ID_LENGTH}")
    if request.call.priority not in _PRIORITIES:
        raise InvalidInput("priority", f"{request.call.priority} is none of {', '.join(Priority.keys())}")
    if request.cache_control not in _CACHE_CONTROLS:
        raise InvalidInput("cache_control", f"{request.cache_control} is none of {', '.join(CacheControl.keys())}")
    if not request.model:
        raise InvalidInput("model", "is empty")


def check_input(request: InferenceRequest, spec: ModelSpec, settings: PipelineSettings) -> int:
    """Checks that the model takes the input. Returns the input's size in bytes. Raises InvalidInput and WrongTask."""
    setting = "max_image_bytes" if has_image(request, spec) else "max_input_bytes"
    input_bytes, limit = (request.encoded or request.input).size_bytes, getattr(settings, setting)
    if input_bytes > limit:
        raise InvalidInput("input", f"{input_bytes} bytes, the limit is {limit} (the gateway's {setting})")
    if request.encoded:
        if TASKS[spec.task].generates:
            raise WrongTask(f"model {spec.name!r} generates text; it takes no tensors")
        return input_bytes
    task = request.input.task
    if task is None:
        raise InvalidInput("input", f"holds no task; model {spec.name!r} takes {' or '.join(spec.tasks)}")
    spec.check_answers(task)
    return input_bytes


def with_long_texts(request: InferenceRequest, setting: str) -> InferenceRequest:
    """Adds the rule for long texts (the setting long_texts) to an input that has none. Raises InvalidInput."""
    task = ANSWERED_TASKS.get(request.input.task or "")
    if setting == "error" or request.encoded or task is None or task.generates:
        return request
    body, fields = request.input.body, request.input.body.DESCRIPTOR.fields_by_name
    if "truncation" not in fields or body.truncation or getattr(body, "window_stride_tokens", 0):
        return request
    ruled = type(body)()
    ruled.CopyFrom(body)
    ruled.truncation = Truncation.TRUNCATION_RIGHT
    if setting == "chunks" and "max_chunks" in fields and not body.max_chunks:
        ruled.max_chunks = MAX_CHUNKS
    return request._replace(input=pack_body(TaskInput, task.name, ruled))


def has_image(request: InferenceRequest, spec: ModelSpec) -> bool:
    """Returns whether the input is an image, or has an image beside texts."""
    if spec.image is None:
        return False
    task = ANSWERED_TASKS.get(request.input.task or "")
    return not spec.takes_texts or (task is not None and task.reads != "texts")


def check_tokens(encoded: EncodedInput, settings: PipelineSettings) -> None:
    """Checks the tokens of all sequences of an input. Raises InvalidInput."""
    tokens, sequences, limit = encoded.tokens, len(encoded.sequences), settings.max_request_tokens
    if tokens > limit:
        raise InvalidInput(
            "input", f"{tokens} tokens in {sequences} sequences, the limit is {limit}; send less at once"
        )


def within_limit(call: Call, settings: PipelineSettings) -> Call:
    """Limits the deadline of the call: a request without a deadline could keep its place for ever."""
    latest_s = time.monotonic() + settings.max_request_s
    if call.deadline_s is not None and call.deadline_s <= latest_s:
        return call
    return call.until(latest_s)
