"""The context of a request: its caller, deadline, priority and trace."""

import time
from dataclasses import dataclass

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import ANONYMOUS, Caller
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.tracing import SpanContext

# Looking it up in the enumeration takes microseconds.
_BULK = Priority.PRIORITY_BULK


@dataclass(frozen=True, slots=True)
class Call:
    """The context of a request. The door makes it once; the stages get copies of their own (`for_stage`).

    `deadline_s`: on this process's time.monotonic() clock; None without a deadline. `trace`: the span to which the next
    work belongs, sampled or not; None without one. `cost_tokens`: the cost of the request in tokens, estimated until it
    is tokenized; 0 if it is not known. `is_beyond_share`: its tenant had more than its share when it began to run, so
    that others' requests go first in the executor. `route_key`: requests with the same one get the same version of a
    model; empty: each by its id.
    """

    request_id: str = ""
    deadline_s: float | None = None
    priority: "Priority.ValueType" = Priority.PRIORITY_INTERACTIVE
    trace: SpanContext | None = None
    caller: Caller = ANONYMOUS
    cost_tokens: int = 0
    is_beyond_share: bool = False
    route_key: str = ""

    @property
    def is_bulk(self) -> bool:
        """Whether the request has bulk priority, so that interactive work goes first."""
        return self.priority == _BULK

    @property
    def remaining_s(self) -> float | None:
        """The seconds until the deadline; None without a deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def for_request(self, request_id: str, priority: "Priority.ValueType") -> "Call":
        """The call of one request in it."""
        of_all = self.caller, self.cost_tokens, self.is_beyond_share, self.route_key
        return Call(request_id, self.deadline_s, priority, self.trace, *of_all)

    def until(self, deadline_s: float) -> "Call":
        """The call with this deadline."""
        of_all = self.caller, self.cost_tokens, self.is_beyond_share, self.route_key
        return Call(self.request_id, deadline_s, self.priority, self.trace, *of_all)

    def for_stage(self, trace: SpanContext | None, cost_tokens: int) -> "Call":
        """The call as a stage gets it."""
        if trace is self.trace and cost_tokens == self.cost_tokens:
            return self
        # dataclasses.replace would take twice as long.
        own = self.request_id, self.deadline_s, self.priority, trace, self.caller
        return Call(*own, cost_tokens, self.is_beyond_share, self.route_key)

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded if no time is left, so that no work is done whose result nobody waits for."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceeded("the deadline passed before the work began")


def internal_error(fault: Exception, call: Call) -> InternalError:
    """The error that a caller gets for a fault of the server. It says where in the log the fault is.

    The fault itself is logged, with the caller's trace if there is one.
    """
    ids = call.trace.ids if call.trace else {}
    if call.caller.tenant:
        ids["tenant"] = call.caller.tenant
    log_fault("a request failed by a fault of the server", fault, request_id=call.request_id, **ids)
    return InternalError(f"internal error; the server's log has it under request_id {call.request_id!r}")


def told_error(error: Exception, call: Call) -> NeuronpipeError:
    """The error that the caller gets: the error itself, or an InternalError for a fault of the server."""
    return error if isinstance(error, NeuronpipeError) else internal_error(error, call)
