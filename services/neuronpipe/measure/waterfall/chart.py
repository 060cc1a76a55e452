"""Draws a trace as text, for a terminal."""

from collections.abc import Iterator

from neuronpipe.core.names import Attributes, Events, Spans
from neuronpipe.measure.waterfall.spans import Row, ShownSpan, Trace

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
