"""The three stages as functions, and what travels with a request through them.

A stage is an async function from an item to a value, and raises the errors of core/errors.py. Whoever holds `Stages` cannot tell near
from far: in one process they are methods of the stage objects, over the network they send the item along with others.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ExecuteItem, ItemContext, PostprocessItem, Prediction, TokenizeItem
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.core.errors import DeadlineExceeded, InternalError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.tracing import SpanContext

# Looking it up in the enumeration takes microseconds.
_BULK = Priority.PRIORITY_BULK
# Almost 300 years: what the wire can hold of a deadline.
_FOREVER_NS = (1 << 63) - 1

Tokenize: TypeAlias = Callable[[TokenizeItem], Awaitable[EncodedInput]]
Execute: TypeAlias = Callable[[ExecuteItem], Awaitable[Prediction]]
Postprocess: TypeAlias = Callable[[PostprocessItem], Awaitable[TaskResult]]


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline's three stages."""

    tokenize: Tokenize
    execute: Execute
    postprocess: Postprocess


@dataclass(slots=True)
class Call:
    """What a request brings along besides its message.

    `deadline_s` is on this process's time.monotonic() clock, or None for none; `traceparent` and `tracestate` are W3C Trace Context.
    """

    deadline_s: float | None = None
    traceparent: str = ""
    tracestate: str = ""
    request_id: str = ""
    priority: "Priority.ValueType" = Priority.PRIORITY_INTERACTIVE

    @classmethod
    def of_item(cls, context: ItemContext) -> "Call":
        """The call that an item belongs to, its deadline put on this process's clock."""
        deadline_s = time.monotonic() + context.remaining_ns / 1e9 if context.remaining_ns else None
        return cls(deadline_s, context.traceparent, context.tracestate, context.request_id, context.priority)

    @property
    def is_bulk(self) -> bool:
        """Whether interactive work goes first."""
        return self.priority == _BULK

    def item_context(self) -> ItemContext:
        """The context for an item sent now. Raises DeadlineExceeded where no time is left."""
        remaining_ns = 0 if self.deadline_s is None else min(_FOREVER_NS, int((self.deadline_s - time.monotonic()) * 1e9))
        if self.deadline_s is not None and remaining_ns <= 0:
            raise DeadlineExceeded("the deadline passed between two stages")
        return ItemContext(
            request_id=self.request_id,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
            remaining_ns=remaining_ns,
            priority=self.priority,
        )

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded where no time is left: what nobody waits for is not computed."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceeded("the deadline passed before the work began")


def internal_error(fault: Exception, request_id: str, traceparent: str = "") -> InternalError:
    """What a caller learns of a fault of ours: where to find it. The fault itself goes to the log, with the caller's trace if any."""
    context = SpanContext.parse(traceparent)
    log_fault("a request failed by a fault of the server", fault, request_id=request_id, **(context.ids if context else {}))
    return InternalError(f"internal error; the server's log has it under request_id {request_id!r}")
