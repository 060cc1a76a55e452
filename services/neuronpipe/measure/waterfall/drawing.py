"""Draws a trace: spans read from OTLP JSON, as rows of text for a terminal, or as a self-contained HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from neuronpipe.core.names import Attributes, Events, Spans

Value: TypeAlias = str | int | float | bool

_STATUS_ERROR = 2


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
        is_error=span["status"].get("code") == _STATUS_ERROR,
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


_BAR_WIDTH = 48
_MAX_MATES = 16
_LABELS = {Spans.PREPROCESS: "pre-process", Spans.PREDICT: "prediction", Spans.POSTPROCESS: "post-process"}


def draw(trace: Trace, client_ns: int) -> Iterator[str]:
    """The lines of a waterfall. `client_ns`: how long the caller waited."""
    root = trace.root
    yield f"trace {trace.trace_id}   {heading(trace)}"
    yield ""
    labels = [("  " * row.depth + short_name(row.span), row) for row in trace.rows]
    label_width = max(len(label) for label, _ in labels)
    service_width = max(len(row.span.service) for _, row in labels)
    for label, row in labels:
        bar = _bar(row, root)
        yield (
            f"{label:{label_width}}  {row.span.service:{service_width}} |{bar}| {row.span.duration_ns / 1e6:9.3f} "
            f"ms{marks(row.span)}"
        )
    yield ""
    yield split(trace)
    yield from first_token(trace)
    outside_ms = (client_ns - root.duration_ns) / 1e6
    yield (
        f"the caller waited {client_ns / 1e6:.3f} ms: {outside_ms:.3f} ms of it outside of the gateway's span "
        "(network, gRPC)"
    )
    for batch in trace.batches:
        yield ""
        yield from _batch(trace, batch)


def short_name(span: ShownSpan) -> str:
    """An rpc without its package."""
    return span.name.rpartition("/")[2]


def heading(trace: Trace) -> str:
    """The request's model and task."""
    attributes = trace.root.attributes
    if Attributes.MODEL not in attributes:
        return "a request for no model that is served"
    words = [
        f"{attributes[Attributes.MODEL]} version {attributes[Attributes.VERSION]}",
        str(attributes[Attributes.TASK]).replace("_", "-"),
    ]
    if Attributes.TOKENS in attributes:
        words.append(f"{attributes[Attributes.TOKENS]} tokens")
    if attributes.get(Attributes.TRUNCATED_TOKENS):
        words.append(f"{attributes[Attributes.TRUNCATED_TOKENS]} dropped")
    return ", ".join(words)


def split(trace: Trace) -> str:
    """The share of each stage in the request's time."""
    parts, total_ns = trace.parts_ns(), max(1, trace.root.duration_ns)

    def share(name: str) -> str:
        return f"{100 * parts[name] / total_ns:.1f} %"

    hop_ns = parts[Spans.PREDICT] - parts[Spans.QUEUE] - parts[Spans.COMPUTE]
    inside = f"queue {share(Spans.QUEUE)}, compute {share(Spans.COMPUTE)}, hop {100 * hop_ns / total_ns:.1f} %"
    stages = (
        f"{label} {share(name)}" + (f" ({inside})" if name == Spans.PREDICT else "") for name, label in _LABELS.items()
    )
    return f"{' + '.join(stages)} + unattributed {share('unattributed')} = {trace.root.duration_ns / 1e6:.3f} ms"


def first_token(trace: Trace) -> Iterator[str]:
    """Of a generated text a line: the parts of the time to its first token, and the time between the others."""
    found = trace.root.attributes
    if Attributes.FIRST_TOKEN_NS not in found:
        return
    parts_ns, total_ns = trace.parts_ns(), int(found[Attributes.FIRST_TOKEN_NS])
    split_ns = {
        "pre-process": parts_ns[Spans.PREPROCESS],
        "queue": parts_ns[Spans.QUEUE],
        "prefill": int(found[Attributes.PREFILL_NS]),
    }
    split_ns["hops"] = total_ns - sum(split_ns.values())
    split_text = " + ".join(f"{name} {part_ns / 1e6:.3f}" for name, part_ns in split_ns.items())
    texts = [row.span.attributes for row in trace.rows if Attributes.GENERATED_TOKENS in row.span.attributes]
    tokens = max((int(one[Attributes.GENERATED_TOKENS]) for one in texts), default=1)
    token_ns = int(found[Attributes.DECODE_NS]) / max(1, tokens - 1)
    yield (
        f"first token after {total_ns / 1e6:.3f} ms = {split_text}; then {tokens - 1} tokens, {token_ns / 1e6:.3f} ms "
        f"each, the longest gap {int(found[Attributes.LONGEST_GAP_NS]) / 1e6:.3f} ms"
    )


def describe_batch(batch: ShownSpan) -> str:
    """One line about a batch, or about a step of texts that are generated."""
    attributes = batch.attributes
    if Attributes.BUCKET_TOKENS not in attributes:
        return (
            f"step of {attributes[Attributes.BATCH_SIZE]} on {attributes[Attributes.BACKEND]}: "
            f"{batch.duration_ns / 1e6:.3f} ms, {attributes[Attributes.TOKENS]} tokens"
        )
    padding = 100 * float(attributes[Attributes.PADDING_RATIO])
    return (
        f"batch of {attributes[Attributes.BATCH_SIZE]} on {attributes[Attributes.BACKEND]}, core "
        f"{attributes[Attributes.CORE]}: "
        f"{batch.duration_ns / 1e6:.3f} ms, padded to {attributes[Attributes.BUCKET_TOKENS]} tokens, "
        f"{padding:.0f} % padding"
    )


def describe_mates(trace: Trace, batch: ShownSpan) -> Iterator[str]:
    """The rows of a batch, one line for each."""
    mates = trace.mates(batch)
    unknown = "a request that is not sampled" if Attributes.BUCKET_TOKENS in batch.attributes else "another text"
    for mate in mates[:_MAX_MATES]:
        whose = "this request" if mate.trace_id == trace.trace_id else f"trace {mate.trace_id}"
        yield (f"row {mate.row:3}  {f'{mate.tokens:4} tokens  {whose}' if mate.trace_id else unknown}")
    if len(mates) > _MAX_MATES:
        yield f"and {len(mates) - _MAX_MATES} more"


def marks(span: ShownSpan) -> str:
    """The error of a span, and its events but for the first token, which is in the split."""
    error = span.attributes.get(Attributes.ERROR_TYPE)
    words = [*(one for one in span.events if one != Events.FIRST_TOKEN), *([str(error)] if error else [])]
    return f"  ! {', '.join(words)}" if words else ""


def _bar(row: Row, root: ShownSpan) -> str:
    scale = _BAR_WIDTH / max(1, root.duration_ns)
    begin = min(_BAR_WIDTH - 1, max(0, int((row.span.started_ns - root.started_ns) * scale)))
    end = min(_BAR_WIDTH, max(begin + 1, round((row.span.ended_ns - root.started_ns) * scale)))
    return " " * begin + "█" * (end - begin) + " " * (_BAR_WIDTH - end)


def _batch(trace: Trace, batch: ShownSpan) -> Iterator[str]:
    yield describe_batch(batch)
    yield from (f"  {line}" for line in describe_mates(trace, batch))


_ROW, _LABEL, _SERVICE, _CHART, _TIME = 22, 210, 130, 520, 110
_MARGIN = 12
_TICKS = 4
_LEGEND_WIDTH = 116
# The meaning of a bar and its colour, in the order of the legend.
_GATEWAY, _ERROR = ("gateway", "#4c78a8"), ("failed", "#e45756")
_PREPROCESS, _PREDICT, _POSTPROCESS = ("pre-process", "#f58518"), ("prediction", "#54a24b"), ("post-process", "#b279a2")
_QUEUE, _COMPUTE = ("queue", "#9ecae9"), ("compute", "#eeca3b")
_LEGEND = (_GATEWAY, _PREPROCESS, _PREDICT, _QUEUE, _COMPUTE, _POSTPROCESS, _ERROR)
_KINDS: dict[str, tuple[str, str]] = {
    Spans.PREPROCESS: _PREPROCESS,
    Spans.PREDICT: _PREDICT,
    Spans.QUEUE: _QUEUE,
    Spans.COMPUTE: _COMPUTE,
    Spans.POSTPROCESS: _POSTPROCESS,
    "tokenizer": _PREPROCESS,
    "neuron-executor": _PREDICT,
    "postprocessor": _POSTPROCESS,
}
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}"
    "svg{max-width:100%;height:auto}pre{background:#f4f4f4;padding:1em;overflow:auto}"
    "table{border-collapse:collapse}td{padding:2px 10px;border-top:1px solid #ddd;vertical-align:top}"
)


def draw_page(trace: Trace, client_ns: int) -> str:
    """The page as HTML."""
    batches = "".join(
        f"<h2>{escape(describe_batch(batch))}</h2><pre>{escape(chr(10).join(describe_mates(trace, batch)))}</pre>"
        for batch in trace.batches
    )
    sums = "".join(f"<p>{escape(line)}</p>" for line in (split(trace), *first_token(trace)))
    rows = "".join(_details(row.span) for row in trace.rows)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>trace '
        f"{trace.trace_id}</title><style>{_STYLE}</style>"
        f"<h1>{escape(heading(trace))}</h1><p>trace {trace.trace_id}; the caller waited {client_ns / 1e6:.3f} ms</p>"
        f"{draw_svg(trace)}{sums}{batches}<h2>Attributes</h2><table>{rows}</table></html>\n"
    )


def draw_svg(trace: Trace) -> str:
    """The waterfall alone, as SVG."""
    width = 2 * _MARGIN + _LABEL + _SERVICE + _CHART + _TIME
    height = 2 * _MARGIN + _ROW * (len(trace.rows) + 2)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(_ticks(trace, height - _ROW))}{''.join(_bars(trace))}{''.join(_legend(height - _MARGIN))}</svg>"
    )


def _ticks(trace: Trace, height: int) -> Iterator[str]:
    left = _MARGIN + _LABEL + _SERVICE
    for tick in range(_TICKS + 1):
        x = left + _CHART * tick / _TICKS
        at_ms = trace.root.duration_ns / 1e6 * tick / _TICKS
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_MARGIN + _ROW - 4}" y2="{height - _MARGIN}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{_MARGIN + 10}" text-anchor="middle" fill="#777">{at_ms:.2f} ms</text>'


def _bars(trace: Trace) -> Iterator[str]:
    root = trace.root
    scale = _CHART / max(1, root.duration_ns)
    left = _MARGIN + _LABEL + _SERVICE
    for number, row in enumerate(trace.rows, 1):
        span, y = row.span, _MARGIN + _ROW * number
        x = left + max(0.0, (span.started_ns - root.started_ns) * scale)
        bar_width = max(1.5, min(span.duration_ns * scale, left + _CHART - x))
        _, colour = _ERROR if span.is_error else _KINDS.get(span.name) or _KINDS.get(span.service, _GATEWAY)
        middle = y + _ROW / 2 + 4
        yield f'<text x="{_MARGIN + 14 * row.depth}" y="{middle}" fill="#222">{escape(short_name(span))}</text>'
        yield f'<text x="{_MARGIN + _LABEL}" y="{middle}" fill="#777">{escape(span.service)}</text>'
        yield f'<rect x="{x:.1f}" y="{y + 4}" width="{bar_width:.1f}" height="{_ROW - 8}" rx="2" fill="{colour}">'
        yield f"<title>{escape(_tooltip(span, root))}</title></rect>"
        text = f"{span.duration_ns / 1e6:.3f} ms{marks(span)}"
        yield f'<text x="{left + _CHART + 8}" y="{middle}" fill="#222">{escape(text)}</text>'


def _legend(bottom: int) -> Iterator[str]:
    for number, (word, colour) in enumerate(_LEGEND):
        x = _MARGIN + number * _LEGEND_WIDTH
        yield f'<rect x="{x}" y="{bottom - 11}" width="12" height="12" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{bottom}" fill="#222">{word}</text>'


def _tooltip(span: ShownSpan, root: ShownSpan) -> str:
    """The tooltip of a bar."""
    begun_ms = (span.started_ns - root.started_ns) / 1e6
    times = (
        f"{begun_ms:.3f} to {begun_ms + span.duration_ns / 1e6:.3f} ms: {span.duration_ns / 1e6:.3f} ms{marks(span)}"
    )
    return "\n".join(
        [f"{span.name} ({span.service})", times, *(f"{key} = {value}" for key, value in span.attributes.items())]
    )


def _details(span: ShownSpan) -> str:
    attributes = "".join(f"{escape(str(key))} = {escape(str(value))}<br>" for key, value in span.attributes.items())
    return f"<tr><td>{escape(short_name(span))}</td><td>{escape(span.service)}</td><td>{attributes}</td></tr>"
