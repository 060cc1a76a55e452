"""Spans as plain numbers: what a request's trace is made of, long before any exporter sees it.

A request that is not sampled costs a coin. A sampled one notes times on time.monotonic_ns(), the clock of its timings, and makes its
spans of them when it ends. Knows no OpenTelemetry SDK.
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

from neuronpipe.core.errors import Cancelled, DeadlineExceeded, InvalidInput, ModelNotFound, NeuronpipeError, Overloaded, WrongTask
from neuronpipe.core.names import Attributes, Events
from neuronpipe.core.status import CODES

AttributeValue: TypeAlias = str | int | float | bool
Sink: TypeAlias = Callable[["Span"], None]

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
# Failures that are the caller's: OpenTelemetry's rpc conventions do not count them as errors of the server.
_CALLERS_FAULTS = (InvalidInput, ModelNotFound, WrongTask, Cancelled, asyncio.CancelledError)
# Samplers compare this part of a trace's id, as OpenTelemetry's TraceIdRatioBased does, so that all decide alike.
_RATIO_BITS = 64
# How long the wall clock's distance from the monotonic one is taken for the same: NTP turns clocks by 0.5 ms a second at most.
_ANCHOR_LIFE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Which span of which trace: what travels."""

    trace_id: int
    span_id: int
    is_sampled: bool
    tracestate: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> "SpanContext | None":
        """The context of a W3C traceparent; None where it is none, which means the same as its absence."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if not match or (match[1] == "00" and match[5]):
            return None
        return cls(int(match[2], 16), int(match[3], 16), bool(int(match[4], 16) & _SAMPLED), tracestate)

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    @property
    def ids(self) -> dict[str, str]:
        """The fields of a log line."""
        return {"trace_id": f"{self.trace_id:032x}", "span_id": f"{self.span_id:016x}"}

    def child(self) -> "SpanContext":
        """The context of a new span in the same trace."""
        return SpanContext(self.trace_id, _new_id(64), self.is_sampled, self.tracestate)

    @classmethod
    def new(cls, *, is_sampled: bool) -> "SpanContext":
        """A span of a new trace."""
        return cls(_new_id(128), _new_id(64), is_sampled)


@dataclass(frozen=True, slots=True)
class Link:
    """A span that this one belongs with."""

    context: SpanContext
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a span; `at_ns` on time.monotonic_ns()."""

    name: str
    at_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A span of a sampled request; times on time.monotonic_ns()."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    started_ns: int
    ended_ns: int = 0
    kind: Literal["internal", "server"] = "internal"
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    is_error: bool = False

    def fail(self, error: BaseException, at_ns: int) -> None:
        """Notes what the span's work failed with. The message stays in the response and the log: it may hold a caller's words."""
        self.attributes[Attributes.ERROR_TYPE] = status_name(error)
        self.is_error = not isinstance(error, _CALLERS_FAULTS)
        if event := event_of(error):
            self.events.append(Event(event, at_ns))


def status_name(error: BaseException | None) -> str:
    """The gRPC status that an error ends a call with."""
    if error is None:
        return "OK"
    if isinstance(error, asyncio.CancelledError):
        return "CANCELLED"
    return Code.Name(CODES[type(error)]) if isinstance(error, NeuronpipeError) else "INTERNAL"


def event_of(error: BaseException) -> str | None:
    """The event that an error is, besides an error."""
    if isinstance(error, Overloaded):
        return Events.SHED
    if isinstance(error, DeadlineExceeded):
        return Events.EXPIRED
    if isinstance(error, Cancelled | asyncio.CancelledError):
        return Events.CANCELLED
    return None


class Tracer:
    """Decides what is sampled and takes the spans. Without sinks nothing is."""

    def __init__(self, sinks: Sequence[Sink] = (), *, ratio: float = 0.0, honours_parent: bool = True) -> None:
        """`ratio`: of the requests without a trace of their own, the share that is sampled."""
        self._sinks = sinks
        self._honours_parent = honours_parent
        self._limit = round(ratio * (1 << _RATIO_BITS))

    @property
    def is_on(self) -> bool:
        """Whether anything can be sampled."""
        return bool(self._sinks)

    def begin(self, parent: SpanContext | None) -> SpanContext | None:
        """The context of a request's first span, None unless it is sampled. `parent`: the caller's span."""
        if not self._sinks:
            return None
        if parent and self._honours_parent:
            return parent.child() if parent.is_sampled else None
        trace_id = parent.trace_id if parent else _new_id(128)
        if trace_id & ((1 << _RATIO_BITS) - 1) >= self._limit:
            return None
        return SpanContext(trace_id, _new_id(64), True, parent.tracestate if parent else "")

    def unsampled(self, parent: SpanContext | None) -> SpanContext | None:
        """The trace of a request that is not sampled, as others get it: they record nothing either, whatever the caller decided.

        A process that takes no part in tracing hands it on as it came.
        """
        return replace(parent, is_sampled=False) if parent and parent.is_sampled and self._sinks else parent

    def joined(self, trace: SpanContext | None) -> SpanContext | None:
        """The context that came with an item, None unless it is sampled: stages leave the decision to the gateway."""
        return trace if trace and trace.is_sampled and self._sinks else None

    def record(self, span: Span) -> None:
        """Takes a span that has ended."""
        for sink in self._sinks:
            sink(span)


class Clock:
    """The wall clock at moments of time.monotonic_ns(), in nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset_ns = 0
        self._anchored_ns: int | None = None

    def wall_ns(self, monotonic_ns: int) -> int:
        """The wall clock's time at a moment. Moments in between keep their distances exactly."""
        now_ns = time.monotonic_ns()
        if self._anchored_ns is None or now_ns - self._anchored_ns > _ANCHOR_LIFE_NS:
            self._offset_ns, self._anchored_ns = _wall_offset_ns(), now_ns
        return monotonic_ns + self._offset_ns


def _wall_offset_ns() -> int:
    """The distance of the two clocks, by the quickest of some readings: another process may run in between."""
    readings = []
    for _ in range(5):
        before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2))
    return min(readings)[1]


def _new_id(bits: int) -> int:
    while True:  # zero is no id
        if identifier := random.getrandbits(bits):
            return identifier


# The span that the running task works on. Of a task, not of the module: it is how log lines and retries find their request.
_CURRENT: ContextVar[Span | None] = ContextVar("neuronpipe_span", default=None)


def current_span() -> Span | None:
    """The span that the running task works on; None where its request is not sampled."""
    return _CURRENT.get()


def enter_span(span: Span | None) -> None:
    """Makes a span the running task's."""
    _CURRENT.set(span)
