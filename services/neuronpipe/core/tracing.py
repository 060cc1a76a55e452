"""Spans as plain numbers, recorded without the OpenTelemetry SDK; exporters convert them.

A request that is not sampled costs one random draw. A sampled request records times on time.monotonic_ns(), the clock
of its timings. Its spans are made of these times when it ends.
"""

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from google.rpc.code_pb2 import Code

from neuronpipe.core import errors
from neuronpipe.core.errors import Cancelled, NeuronpipeError
from neuronpipe.core.names import Attributes, Events
from neuronpipe.core.status import CODES

AttributeValue: TypeAlias = str | int | float | bool
Sink: TypeAlias = Callable[["Span"], None]

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
# Failures of the caller: by OpenTelemetry's rpc conventions they are no errors of the server.
_CALLERS_FAULTS = (errors.InvalidInput, errors.ModelNotFound, errors.WrongTask, Cancelled, asyncio.CancelledError)
# Sampling compares this part of a trace's id, as TraceIdRatioBased of OpenTelemetry does: all samplers decide alike.
_RATIO_BITS = 64
# The life of the offset between wall clock and monotonic clock: NTP adjusts clocks by 0.5 ms a second at most.
_ANCHOR_LIFE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The context of a span, as it is propagated: trace id, span id, whether the span is sampled."""

    trace_id: int
    span_id: int
    is_sampled: bool
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> "SpanContext | None":
        """Returns the context of a W3C traceparent; None for an invalid traceparent, which counts as absent."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if not match or (match[1] == "00" and match[5]):
            return None
        return cls(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED), tracestate)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    @property
    def ids(self) -> dict[str, str]:
        """The fields of a log line."""
        return {"trace_id": f"{self.trace_id:032x}", "span_id": f"{self.span_id:016x}"}

    def child(self) -> "SpanContext":
        """Returns the context of a new span in the same trace."""
        return SpanContext(self.trace_id, _new_id(64), self.is_sampled, self.tracestate)

    @classmethod
    def new(cls, *, is_sampled: bool) -> "SpanContext":
        return cls(_new_id(128), _new_id(64), is_sampled)


@dataclass(frozen=True, slots=True)
class Link:
    """A link to a related span."""

    context: SpanContext
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event of a span. `at_ns`: on time.monotonic_ns()."""

    name: str
    at_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A span of a sampled request. Its times are on time.monotonic_ns()."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    started_ns: int
    ended_ns: int = 0
    kind: Literal["internal", "server"] = "internal"
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    is_error: bool = False

    def fail(self, error: BaseException, at_ns: int) -> None:
        """Records the error of the span's work, without its message, which may hold a caller's text."""
        self.attributes[Attributes.ERROR_TYPE] = status_name(error)
        self.is_error = not isinstance(error, _CALLERS_FAULTS)
        if event := event_of(error):
            self.events.append(SpanEvent(event, at_ns))


def status_name(error: BaseException | None) -> str:
    """Returns the gRPC status with which an error ends a call."""
    if error is None:
        return "OK"
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return Code.Name(CODES[type(error)]) if isinstance(error, NeuronpipeError) else "INTERNAL"


def event_of(error: BaseException) -> str | None:
    """Returns the name of the span event for an error such as a passed deadline; None for other errors."""
    if isinstance(error, errors.Overloaded):
        return Events.SHED
    if isinstance(error, errors.DeadlineExceeded):
        return Events.EXPIRED
    if isinstance(error, Cancelled | asyncio.CancelledError):
        return Events.CANCELLED
    return None


class Tracer:
    """Decides which requests are sampled, and passes ended spans to the sinks. Without sinks nothing is sampled."""

    def __init__(self, sinks: Sequence[Sink] = (), *, ratio: float = 0.0, honours_parent: bool = True) -> None:
        """`ratio`: the share that is sampled of the requests without a trace of their own."""
        self._sinks = sinks
        self._honours_parent = honours_parent
        self._limit = round(ratio * (1 << _RATIO_BITS))

    @property
    def is_on(self) -> bool:
        return bool(self._sinks)

    def begin(self, parent: SpanContext | None) -> SpanContext | None:
        """Returns the context of a request's first span; None unless it is sampled. `parent`: the caller's span."""
        if not self._sinks:
            return None
        if parent and self._honours_parent:
            return parent.child() if parent.is_sampled else None
        trace_id = parent.trace_id if parent else _new_id(128)
        if trace_id & ((1 << _RATIO_BITS) - 1) >= self._limit:
            return None
        return SpanContext(trace_id, _new_id(64), True, parent.tracestate if parent else "")

    def unsampled(self, parent: SpanContext | None) -> SpanContext | None:
        """Returns the context to pass on for a request that is not sampled, so that stages do not record it."""
        return replace(parent, is_sampled=False) if parent and parent.is_sampled and self._sinks else parent

    def joined(self, trace: SpanContext | None) -> SpanContext | None:
        """Returns the context that came with an item; None unless it is sampled. The gateway decides, stages follow."""
        return trace if trace and trace.is_sampled and self._sinks else None

    def record(self, span: Span) -> None:
        for sink in self._sinks:
            sink(span)


class Clock:
    """Converts times of time.monotonic_ns() to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self._anchored_ns: int | None = None

    def wall_ns(self, monotonic_ns: int) -> int:
        """Returns the wall clock's time. Differences between times are kept exactly."""
        now_ns = time.monotonic_ns()
        if self._anchored_ns is None or now_ns - self._anchored_ns > _ANCHOR_LIFE_NS:
            self._offset_ns, self._anchored_ns = _wall_offset_ns(), now_ns
        return monotonic_ns + self._offset_ns


def _wall_offset_ns() -> int:
    """Returns the offset between the two clocks. The fastest of several readings counts, because another process may
    run during a reading.
    """
    readings = []
    for _ in range(5):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


def new_request_id() -> str:
    """Returns a unique id for a request whose caller gave none. It is no secret, so a fast random source is enough."""
    return f"{random.getrandbits(128):032x}"


def _new_id(bits: int) -> int:
    while True:  # zero is not a valid id
        if identifier := random.getrandbits(bits):
            return identifier


# The span of the running task. A context variable is per task: log lines and retries find their request by it.
_CURRENT: ContextVar[Span | None] = ContextVar("neuronpipe_span", default=None)


def current_span() -> Span | None:
    """Returns the span of the running task; None if its request is not sampled."""
    return _CURRENT.get()


def enter_span(span: Span | None) -> None:
    _CURRENT.set(span)
