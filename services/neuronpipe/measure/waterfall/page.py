"""Draws a trace as a self-contained HTML page."""

from collections.abc import Iterator
from html import escape

from neuronpipe.core.names import Spans
from neuronpipe.measure.waterfall.chart import (
    describe_batch,
    describe_mates,
    first_token,
    heading,
    marks,
    short_name,
    split,
)
from neuronpipe.measure.waterfall.spans import ShownSpan, Trace

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
