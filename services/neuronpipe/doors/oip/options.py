"""Reads the parameters of a request: the protocol's own parameters, and the options of the model's task."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors.oip.tensors import Parameter, shown

CACHE_CONTROL = "cache_control"
_CACHE_CONTROLS = {"bypass": CacheControl.CACHE_CONTROL_BYPASS, "refresh": CacheControl.CACHE_CONTROL_REFRESH}
# Parameters of clients that change nothing here. Triton reserves the prefix.
_IGNORED, _IGNORED_PREFIX = frozenset({"headers", "binary_data_output"}), "triton_"
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
_PRIORITIES = {0: Priority.PRIORITY_UNSPECIFIED, 1: Priority.PRIORITY_INTERACTIVE}
_KNOWN = ("priority", "timeout", CACHE_CONTROL)
_MICROSECONDS = 1_000_000
DATA_SIZE, IS_BINARY = "binary_data_size", "binary_data"
# The meaning of a tensor's bytes, as MLServer's clients send it. Without base64 it is what the datatype says.
CONTENT_TYPE, BASE64 = "content_type", "base64"
CONTENT_TYPES = ("str", "np")


@dataclass(frozen=True, slots=True)
class Options:
    """A request's parameters. `of_task`: the options of the model's task."""

    priority: "Priority.ValueType" = Priority.PRIORITY_INTERACTIVE
    timeout_s: float | None = None
    cache_control: "CacheControl.ValueType" = CacheControl.CACHE_CONTROL_UNSPECIFIED
    of_task: Mapping[str, Parameter] = field(default_factory=dict)

    def call_for(self, call: Call, request_id: str) -> Call:
        """Returns the call of the request, with the request's id or a new id, and the sooner deadline."""
        request_call = call.for_request(request_id or call.request_id or new_request_id(), self.priority)
        if self.timeout_s is None:
            return request_call
        return request_call.until(min(request_call.deadline_s or math.inf, time.monotonic() + self.timeout_s))


_NONE = Options()


def read_options(parameters: Mapping[str, Parameter], of_task: Mapping[str, str]) -> Options:
    """Reads the parameters of a request. `of_task`: the parameters of the model's task. Raises InvalidInput."""
    if not parameters:
        return _NONE
    task_options: dict[str, Parameter] = {}
    for name, value in parameters.items():
        if name in of_task:
            task_options[name] = value
        elif name in _SEQUENCE:
            if value:
                raise InvalidInput(name, "there are no sequences: requests do not depend on each other")
        elif name not in (*_KNOWN, *_IGNORED) and not name.startswith(_IGNORED_PREFIX):
            raise InvalidInput(
                "parameters", f"there is no parameter {shown(name)}, only {', '.join((*of_task, *_KNOWN))}"
            )
    return Options(
        _PRIORITIES.get(_whole("priority", parameters), Priority.PRIORITY_BULK),
        _whole("timeout", parameters) / _MICROSECONDS or None,
        _cache_control(parameters.get(CACHE_CONTROL)),
        task_options,
    )


def check_tensor_parameters(
    field: str, parameters: Iterable[tuple[str, Parameter]], known: str, content_types: Sequence[str] = CONTENT_TYPES
) -> None:
    """Refuses parameters of an input or an output, `field`, that have no meaning here.

    `known`: the name of a parameter beside the type of the contents. Raises InvalidInput.
    """
    for name, value in parameters:
        if name == CONTENT_TYPE:
            if value not in content_types:
                problem = f"{shown(value)}, must be {' or '.join(content_types)}"
                raise InvalidInput(f"{field}.parameters.{name}", problem)
        elif name != known and not name.startswith(_IGNORED_PREFIX):
            problem = f"there is no parameter {shown(name)}, only {known}, {CONTENT_TYPE}"
            raise InvalidInput(f"{field}.parameters", problem)


def _whole(name: str, parameters: Mapping[str, Parameter]) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(name, f"{shown(value)}, must be a whole number from 0 on")
    return value


def _cache_control(value: Parameter | None) -> "CacheControl.ValueType":
    if value is None:
        return CacheControl.CACHE_CONTROL_UNSPECIFIED
    if isinstance(value, str) and value in _CACHE_CONTROLS:
        return _CACHE_CONTROLS[value]
    raise InvalidInput(CACHE_CONTROL, f"{shown(value)}, must be {' or '.join(_CACHE_CONTROLS)}")
