"""The three stages as functions, and what travels with a request through them.

A stage is an async function from a request message to a response message. A gRPC stub's method has that shape too, so whoever holds
`Stages` cannot tell near from far.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.stages_pb2 import (
    ExecuteRequest,
    ExecuteResponse,
    ItemContext,
    PostprocessRequest,
    PostprocessResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.status import to_status

Tokenize: TypeAlias = Callable[[TokenizeRequest], Awaitable[TokenizeResponse]]
Execute: TypeAlias = Callable[[ExecuteRequest], Awaitable[ExecuteResponse]]
Postprocess: TypeAlias = Callable[[PostprocessRequest], Awaitable[PostprocessResponse]]


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline's three stages."""

    tokenize: Tokenize
    execute: Execute
    postprocess: Postprocess


@dataclass(frozen=True, slots=True)
class Call:
    """What a request brings along besides its message.

    `deadline_s` is on this process's time.monotonic() clock, or None for none; `traceparent` and `tracestate` are W3C Trace Context.
    """

    deadline_s: float | None = None
    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of_item(cls, context: ItemContext) -> "Call":
        """The call that an item belongs to, its deadline put on this process's clock."""
        deadline_s = time.monotonic() + context.remaining_ns / 1e9 if context.remaining_ns else None
        return cls(deadline_s, context.traceparent, context.tracestate)

    def item_context(self, request_id: str) -> ItemContext:
        """The context for an item sent now. Raises DeadlineExceeded where no time is left."""
        remaining_ns = 0 if self.deadline_s is None else int((self.deadline_s - time.monotonic()) * 1e9)
        if self.deadline_s is not None and remaining_ns <= 0:
            raise DeadlineExceeded("the deadline passed between two stages")
        return ItemContext(request_id=request_id, traceparent=self.traceparent, tracestate=self.tracestate, remaining_ns=remaining_ns)

    def check_deadline(self) -> None:
        """Raises DeadlineExceeded where no time is left: what nobody waits for is not computed."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            raise DeadlineExceeded("the deadline passed before the work began")


class Item(Protocol):
    """What the items of all stages have in common."""

    @property
    def context(self) -> ItemContext: ...


ItemT = TypeVar("ItemT", bound=Item)
OutcomeT = TypeVar("OutcomeT")


async def each_alone(
    items: list[ItemT], work: Callable[[ItemT], Awaitable[OutcomeT]], failed: Callable[[Status], OutcomeT]
) -> list[OutcomeT]:
    """Runs `work` on all items side by side; an item that fails gets `failed(status)` and leaves the others alone."""

    async def outcome(item: ItemT) -> OutcomeT:
        try:
            return await work(item)
        except NeuronpipeError as error:
            return failed(to_status(error))
        except Exception as fault:
            return failed(to_status(internal_error(fault, item.context.request_id)))

    if len(items) == 1:
        return [await outcome(items[0])]
    return list(await asyncio.gather(*map(outcome, items)))


def internal_error(fault: Exception, request_id: str) -> InternalError:
    """What a caller learns of a fault of ours: where to find it. The fault itself goes to the log."""
    log_fault("a request failed by a fault of the server", fault, request_id=request_id)
    return InternalError(f"internal error; the server's log has it under request_id {request_id!r}")
