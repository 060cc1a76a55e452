"""What a request brings along besides its input: who asks, until when, how urgently."""

import time
from dataclasses import dataclass

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.tracing import SpanContext

# Looking it up in the enumeration takes microseconds.
_BULK = Priority.PRIORITY_BULK


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and whose quota counts. Everybody is anonymous until there is authentication."""

    name: str = ""
    tenant: str = ""


ANONYMOUS = Caller()


@dataclass(frozen=True, slots=True)
class Call:
    """Made once at the door; the stages get copies of their own (`for_stage`).

    `deadline_s`: on this process's time.monotonic() clock, None for none. `trace`: the span that the next work belongs to, sampled or
    not; None without one. `cost_tokens`: what the request counts as, estimated until it is tokenized; 0 where nothing is known.
    """

    request_id: str = ""
    deadline_s: float | None = None
    priority: "Priority.ValueType" = Priority.PRIORITY_INTERACTIVE
    trace: SpanContext | None = None
    caller: Caller = ANONYMOUS
    cost_tokens: int = 0

    @property
    def is_bulk(self) -> bool:
        """Whether interactive work goes first."""
        return self.priority == _BULK

    @property
    def remaining_s(self) -> float | None:
        """What is left of the deadline; None for no deadline."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    def for_request(self, request_id: str, priority: "Priority.ValueType") -> "Call":
        """The same call as one of its requests gets it."""
        return Call(request_id, self.deadline_s, priority, self.trace, self.caller, self.cost_tokens)

    def for_stage(self, trace: SpanContext | None, cost_tokens: int) -> "Call":
        """The same call as a stage gets it."""
        if trace is self.trace and cost_tokens == self.cost_tokens:
            return self
        # Not by dataclasses.replace, which takes twice as long.
        return Call(self.request_id, self.deadline_s, self.priority, trace, self.caller, cost_tokens)

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded where no time is left: what nobody waits for is not computed."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceeded("the deadline passed before the work began")


def internal_error(fault: Exception, call: Call) -> InternalError:
    """What a caller learns of a fault of ours: where to find it. The fault itself goes to the log, with the caller's trace if any."""
    ids = call.trace.ids if call.trace else {}
    log_fault("a request failed by a fault of the server", fault, request_id=call.request_id, **ids)
    return InternalError(f"internal error; the server's log has it under request_id {call.request_id!r}")


def told_error(error: Exception, call: Call) -> NeuronpipeError:
    """What a caller learns of an error: itself, or an internal error for a fault of ours."""
    return error if isinstance(error, NeuronpipeError) else internal_error(error, call)
