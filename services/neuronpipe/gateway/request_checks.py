"""What a request must be before anything is computed, and how large its input may be."""

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.inference import InferenceRequest
from neuronpipe.gateway.settings import PipelineSettings

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
    setting = "max_image_bytes" if spec.image else "max_input_bytes"
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


def check_tokens(encoded: EncodedInput, settings: PipelineSettings) -> None:
    """Checks the tokens of all sequences of an input. Raises InvalidInput."""
    tokens, sequences, limit = encoded.tokens, len(encoded.sequences), settings.max_request_tokens
    if tokens > limit:
        raise InvalidInput(
            "input",
            f"{tokens} tokens in {sequences} sequences, the limit is {limit} (the gateway's max_request_tokens)",
        )
