"""What a request must be before anything is computed, how large its input may be, and how long it may take."""

import time

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.inference import InferenceRequest
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.text_generation import most_generated

# So the default limit of a million tokens in flight keeps images to 64 MiB of memory.
_IMAGE_BYTES_PER_TOKEN = 64
_MAX_REQUEST_ID_LENGTH = 256
_PRIORITIES, _CACHE_CONTROLS = frozenset(Priority.values()), frozenset(CacheControl.values())


def check_fields(request: InferenceRequest) -> None:
    """Checks the fields besides the input. Raises InvalidInput."""
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
        return input_bytes
    task = request.input.task
    if task is None:
        raise InvalidInput("input", f"holds no task; model {spec.name!r} takes {' or '.join(spec.tasks)}")
    spec.check_answers(task)
    return input_bytes


def has_image(request: InferenceRequest, spec: ModelSpec) -> bool:
    """Whether the input is an image, or has one beside texts."""
    task = ANSWERED_TASKS.get(request.input.task or "")
    return spec.image is not None and (not spec.takes_texts or (task is not None and task.reads != "texts"))


def known_tokens(request: InferenceRequest, spec: ModelSpec, input_bytes: int) -> int | None:
    """What a request costs, where that is known before it is tokenized."""
    if has_image(request, spec):  # its tokens are known, and nearly nothing beside the bytes that it takes
        return spec.image_tokens + input_bytes // _IMAGE_BYTES_PER_TOKEN
    return request.encoded.tokens if request.encoded else None


def new_tokens(request: InferenceRequest, spec: ModelSpec) -> int:
    """The most tokens that a request generates. Raises InvalidInput."""
    task = TASKS[spec.task]
    if not task.generates or request.encoded or request.input.task != task.name:
        return 0
    return most_generated(getattr(request.input.message, task.name).options, spec)


def check_tokens(encoded: EncodedInput, settings: PipelineSettings) -> None:
    """Checks the tokens of all sequences of an input. Raises InvalidInput."""
    tokens, sequences, limit = encoded.tokens, len(encoded.sequences), settings.max_request_tokens
    if tokens > limit:
        raise InvalidInput(
            "input",
            f"{tokens} tokens in {sequences} sequences, the limit is {limit} (the gateway's max_request_tokens)",
        )


def within_limit(call: Call, settings: PipelineSettings) -> Call:
    """The call with a deadline: a request that nobody ends would hold its place for ever."""
    latest_s = time.monotonic() + settings.max_request_s
    if call.deadline_s is not None and call.deadline_s <= latest_s:
        return call
    return call.until(latest_s)


def too_late(request: InferenceRequest, call: Call, settings: PipelineSettings) -> DeadlineExceeded:
    """The error of a request whose deadline has passed. `call`: its call within the limit."""
    # Not by the clock: an event loop's timers may be some milliseconds early.
    if call.deadline_s == request.call.deadline_s:
        return DeadlineExceeded("the deadline passed before the result was ready")
    return DeadlineExceeded(f"the result was not ready after {settings.max_request_s:g} s, the gateway's max_request_s")
