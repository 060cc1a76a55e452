"""A trace as a page of its own, without anything from elsewhere."""

from collections.abc import Iterator
from html import escape

from neuronpipe.core.telemetry import Spans
from neuronpipe.trace.spans import ShownSpan, Trace
from neuronpipe.trace.waterfall import describe_batch, describe_mates, heading, marks, short_name, split

_ROW, _LABEL, _SERVICE, _CHART, _TIME = 22, 210, 130, 520, 110
_MARGIN = 12
_TICKS = 4
_COLOURS: dict[str, str] = {
    "gateway": "#4c78a8",
    "tokenizer": "#f58518",
    "neuron-executor": "#54a24b",
    "postprocessor": "#b279a2",
    "all": "#4c78a8",
}
_STAGE_COLOURS: dict[str, str] = {
    Spans.PREPROCESS: "#f58518",
    Spans.PREDICT: "#54a24b",
    Spans.POSTPROCESS: "#b279a2",
    Spans.QUEUE: "#9ecae9",
}
_ERROR = "#e45756"
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
    rows = "".join(_details(row.span) for row in trace.rows)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>trace {trace.trace_id}</title><style>{_STYLE}</style>'
        f"<h1>{escape(heading(trace))}</h1><p>trace {trace.trace_id}; the caller waited {client_ns / 1e6:.3f} ms</p>"
        f"{draw_svg(trace)}<p>{escape(split(trace))}</p>{batches}<h2>Attributes</h2><table>{rows}</table></html>\n"
    )


def draw_svg(trace: Trace) -> str:
    """The waterfall alone, as SVG."""
    width = 2 * _MARGIN + _LABEL + _SERVICE + _CHART + _TIME
    height = 2 * _MARGIN + _ROW * (len(trace.rows) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui,sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(_ticks(trace, height))}{''.join(_bars(trace))}</svg>"
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
        colour = _ERROR if span.is_error else _STAGE_COLOURS.get(span.name) or _COLOURS.get(span.service, "#888")
        middle = y + _ROW / 2 + 4
        yield f'<text x="{_MARGIN + 14 * row.depth}" y="{middle}" fill="#222">{escape(short_name(span))}</text>'
        yield f'<text x="{_MARGIN + _LABEL}" y="{middle}" fill="#777">{escape(span.service)}</text>'
        yield f'<rect x="{x:.1f}" y="{y + 4}" width="{bar_width:.1f}" height="{_ROW - 8}" rx="2" fill="{colour}"/>'
        text = f"{span.duration_ns / 1e6:.3f} ms{marks(span)}"
        yield f'<text x="{left + _CHART + 8}" y="{middle}" fill="#222">{escape(text)}</text>'


def _details(span: ShownSpan) -> str:
    attributes = "".join(f"{escape(str(key))} = {escape(str(value))}<br>" for key, value in span.attributes.items())
    return f"<tr><td>{escape(short_name(span))}</td><td>{escape(span.service)}</td><td>{attributes}</td></tr>"
