"""Spans read from OTLP JSON, and the rows of a waterfall that they make."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from neuronpipe.core.names import Attributes, Spans

Value: TypeAlias = str | int | float | bool

_ERROR = 2


@dataclass(frozen=True, slots=True)
class ShownSpan:
    """A span as it was sent; times since 1970. `links`: (trace id, span id) and attributes."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    is_error: bool
    attributes: Mapping[str, Value]
    events: tuple[str, ...]
    links: tuple[tuple[tuple[str, str], Mapping[str, Value]], ...]

    @property
    def duration_ns(self) -> int:
        """The duration of the span."""
        return self.ended_ns - self.started_ns


@dataclass(frozen=True, slots=True)
class Row:
    """A span in a waterfall, with its depth."""

    span: ShownSpan
    depth: int


@dataclass(frozen=True, slots=True)
class Mate:
    """A row of a batch; `trace_id` is empty where its request is not sampled."""

    row: int
    tokens: int
    trace_id: str


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's spans as a tree, the root first, and the batches that it ran in."""

    trace_id: str
    rows: list[Row]
    batches: list[ShownSpan]

    @property
    def root(self) -> ShownSpan:
        """The request."""
        return self.rows[0].span

    def parts_ns(self) -> dict[str, int]:
        """The time of each stage, of queue and of compute, in the order of the request; "unattributed" is in no stage.

        Spans of one name may overlap, as those of several sequences do. Overlapping time counts once, and as compute if
        one of the spans computes.
        """
        names = (Spans.PREPROCESS, Spans.QUEUE, Spans.COMPUTE, Spans.PREDICT, Spans.POSTPROCESS)
        covered: dict[str, int] = {name: self._covered_ns(name) for name in names}
        covered[Spans.QUEUE] = self._covered_ns(Spans.QUEUE, Spans.COMPUTE) - covered[Spans.COMPUTE]
        stages_ns = self._covered_ns(Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
        return {**covered, "unattributed": self.root.duration_ns - stages_ns}

    def _covered_ns(self, *names: str) -> int:
        """The length of the union of all spans with these names."""
        covered_ns = ended_ns = 0
        for started_ns, span_ended_ns in sorted(
            (row.span.started_ns, row.span.ended_ns) for row in self.rows if row.span.name in names
        ):
            covered_ns += max(0, span_ended_ns - max(started_ns, ended_ns))
            ended_ns = max(ended_ns, span_ended_ns)
        return covered_ns

    def mates(self, batch: ShownSpan) -> list[Mate]:
        """The rows of a batch in order."""
        known = {
            int(row[Attributes.ROW]): (int(row[Attributes.TOKENS]), trace_id) for (trace_id, _), row in batch.links
        }
        size = int(batch.attributes[Attributes.BATCH_SIZE])
        return [Mate(row, *known.get(row, (0, ""))) for row in range(size)]


def read_trace(otlp: Mapping[str, Any], trace_id: str) -> Trace | None:
    """The trace in OTLP JSON; None if it has no span."""
    spans = list(_spans(otlp))
    own = sorted(
        (span for span in spans if span.trace_id == trace_id), key=lambda span: (span.started_ns, -span.ended_ns)
    )
    known = {span.span_id for span in own}
    children: dict[str, list[ShownSpan]] = {}
    for span in own:
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    rows = list(_tree(children, "", 0))
    batches = sorted((span for span in spans if span.trace_id != trace_id), key=lambda span: span.started_ns)
    return Trace(trace_id, rows, batches) if rows else None


def _tree(children: Mapping[str, Sequence[ShownSpan]], parent_id: str, depth: int) -> Iterator[Row]:
    for span in children.get(parent_id, ()):
        yield Row(span, depth)
        yield from _tree(children, span.span_id, depth + 1)


def _spans(otlp: Mapping[str, Any]) -> Iterator[ShownSpan]:
    for resource in otlp["resourceSpans"]:
        service = str(_attributes(resource["resource"]["attributes"])["service.name"])
        for scope in resource["scopeSpans"]:
            yield from (_span(service, span) for span in scope["spans"])


def _span(service: str, span: Mapping[str, Any]) -> ShownSpan:
    return ShownSpan(
        service=service,
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        started_ns=int(span["startTimeUnixNano"]),
        ended_ns=int(span["endTimeUnixNano"]),
        is_error=span["status"].get("code") == _ERROR,
        attributes=_attributes(span["attributes"]),
        events=tuple(event["name"] for event in span["events"]),
        links=tuple(((link["traceId"], link["spanId"]), _attributes(link["attributes"])) for link in span["links"]),
    )


def _attributes(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for one in attributes:
        ((kind, value),) = one["value"].items()
        found[one["key"]] = int(value) if kind == "intValue" else value
    return found
