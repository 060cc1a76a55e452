"""The context of a request: its caller, deadline, priority, trace and route key."""

import time
from typing import NamedTuple

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import ANONYMOUS, Caller
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.tracing import SpanContext

# A constant, as others of this kind: a lookup in an enumeration takes a microsecond.
BULK = Priority.PRIORITY_BULK


class Call(NamedTuple):
    """The context of a request, which is the same for all stages. The door makes it. `Work` has what differs by stage.

    - `deadline_s`: on this process's time.monotonic() clock; None without a deadline.
    - `trace`: the caller's span, sampled or not; None if the caller has none.
    - `route_key`: requests with the same key get the same version of a model; empty: the version follows from the
      request's id.
    """

    request_id: str = ""
    deadline_s: float | None = None
    priority: "Priority.ValueType" = Priority.PRIORITY_INTERACTIVE
    trace: SpanContext | None = None
    caller: Caller = ANONYMOUS
    route_key: str = ""

    @property
    def is_bulk(self) -> bool:
        """Whether the request has bulk priority, so that interactive work goes first."""
        return self.priority == BULK

    @property
    def remaining_s(self) -> float | None:
        """The seconds until the deadline; None without a deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def for_request(self, request_id: str, priority: "Priority.ValueType") -> "Call":
        """Makes the call of one of this call's requests."""
        return self._replace(request_id=request_id, priority=priority)

    def until(self, deadline_s: float) -> "Call":
        return self._replace(deadline_s=deadline_s)

    def check_deadline(self, *, has_begun: bool = False) -> None:
        """Raises DeadlineExceeded if no time is left, so that no work is done for a caller who has left. `has_begun`:
        whether an earlier stage has worked on the request.
        """
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceeded(
                "the deadline passed before the result was ready"
                if has_begun
                else "the deadline passed before the work began"
            )


def internal_error(fault: Exception, call: Call) -> InternalError:
    """Logs a fault of the server, and returns the error that says where in the log the fault is."""
    ids = call.trace.ids if call.trace else {}
    if call.caller.tenant:
        ids["tenant"] = call.caller.tenant
    log_fault("a request failed by a fault of the server", fault, request_id=call.request_id, **ids)
    return InternalError(f"internal error; the server's log has it under request_id {call.request_id!r}")


def to_caller_error(error: Exception, call: Call) -> NeuronpipeError:
    """Returns the error that the caller gets: the error itself, or an InternalError, whose cause is the fault."""
    if isinstance(error, NeuronpipeError):
        return error
    caller_error = internal_error(error, call)
    caller_error.__cause__ = error
    return caller_error
