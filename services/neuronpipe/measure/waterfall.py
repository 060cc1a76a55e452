"""`neuronpipe trace`: sends one sampled request, reads its spans from OTLP JSON, and draws them as rows of text."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest
from neuronpipe.api.v1.traces_pb2_grpc import TraceServiceStub
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.names import TRACEPARENT, Attributes, Events, Spans
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.tls import LoadedTls, TlsFiles, watched_tls
from neuronpipe.rpc.client import error_of, key_metadata, open_channel, undamaged

_TRACES_LIMIT_S = 10.0


def sample(
    request: InferRequest,
    target: str,
    *,
    timeout_s: float,
    warm_up: int,
    otlp: Path | None,
    tls: TlsFiles | None = None,
) -> None:
    """Prints the waterfall of one request, which is sent after `warm_up` others.

    `otlp`: the file that also gets its spans. Raises SetupError, and the request's error after its trace is shown.
    """
    context = SpanContext(int(secrets.token_hex(16), 16), int(secrets.token_hex(8), 16), is_sampled=True)
    loaded = watched_tls(tls, "client").value if tls else None
    spans, client_ns, failure = asyncio.run(_record(request, target, loaded, timeout_s, warm_up, context))
    if otlp:
        otlp.write_text(json.dumps(spans, indent=1))
    trace = read_trace(spans, f"{context.trace_id:032x}")
    if trace:
        print("\n".join(draw(trace, client_ns)))
    elif not failure:
        raise SetupError(f"{target} has dropped this trace already: --kept-traces is too small for its load")
    if failure:
        raise failure


async def _record(
    request: InferRequest, target: str, tls: LoadedTls | None, timeout_s: float, warm_up: int, context: SpanContext
) -> tuple[dict[str, Any], int, NeuronpipeError | None]:
    """Returns the request's spans as OTLP JSON, its duration as the caller measured it, and its error if it failed."""
    key = key_metadata(target=target, is_encrypted=tls is not None)
    async with open_channel(target, tls=tls) as channel:
        for _ in range(warm_up):  # the first request of a connection also opens it
            await _infer(channel, request, timeout_s, key)
        began_ns = time.monotonic_ns()
        failure = await _infer(channel, request, timeout_s, [*key, (TRACEPARENT, context.traceparent)])
        client_ns = time.monotonic_ns() - began_ns
        return await _find_trace(channel, context, key, failure), client_ns, failure


async def _infer(
    channel: grpc.aio.Channel, request: InferRequest, timeout_s: float, metadata: Sequence[tuple[str, str]]
) -> NeuronpipeError | None:
    try:
        await InferenceServiceStub(channel).Infer(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as failure:
        return error_of(failure)
    return None


async def _find_trace(
    channel: grpc.aio.Channel, context: SpanContext, key: Sequence[tuple[str, str]], failure: NeuronpipeError | None
) -> dict[str, Any]:
    try:
        response = await TraceServiceStub(channel).GetTrace(
            GetTraceRequest(trace_id=f"{context.trace_id:032x}"), timeout=_TRACES_LIMIT_S, metadata=key
        )
    except grpc.aio.AioRpcError as error:
        if failure:
            raise failure from error
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise SetupError("the gateway keeps no traces; start it, and its stages, with --kept-traces 100") from error
        raise error_of(error) from error
    spans: dict[str, Any] = json.loads(undamaged(response).otlp_json)
    return spans


Value: TypeAlias = str | int | float | bool


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
    attributes: Mapping[str, Value]
    events: tuple[str, ...]
    links: tuple[tuple[tuple[str, str], Mapping[str, Value]], ...]

    @property
    def duration_ns(self) -> int:
        return self.ended_ns - self.started_ns


@dataclass(frozen=True, slots=True)
class WaterfallRow:
    """A span in a waterfall, with its depth."""

    span: ShownSpan
    depth: int


@dataclass(frozen=True, slots=True)
class Mate:
    """A row of a batch. `trace_id`: empty if its request is not sampled."""

    row: int
    tokens: int
    trace_id: str


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's spans as a tree, the root first, and the batches that it ran in."""

    trace_id: str
    rows: list[WaterfallRow]
    batches: list[ShownSpan]

    @property
    def root(self) -> ShownSpan:
        """The span of the request."""
        return self.rows[0].span

    def parts_ns(self) -> dict[str, int]:
        """Returns the time of each stage, queue and compute in the request's order; "unattributed" is in no stage.

        Spans of one name may overlap, as the spans of several sequences do. Overlapping time counts once, and as
        compute if one of the spans computes.
        """
        names = (Spans.PREPROCESS, Spans.QUEUE, Spans.COMPUTE, Spans.PREDICT, Spans.POSTPROCESS)
        covered: dict[str, int] = {name: self._covered_ns(name) for name in names}
        covered[Spans.QUEUE] = self._covered_ns(Spans.QUEUE, Spans.COMPUTE) - covered[Spans.COMPUTE]
        stages_ns = self._covered_ns(Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
        return {**covered, "unattributed": self.root.duration_ns - stages_ns}

    def _covered_ns(self, *names: str) -> int:
        """Returns the length of the union of all spans with these names."""
        covered_ns = ended_ns = 0
        for started_ns, span_ended_ns in sorted(
            (row.span.started_ns, row.span.ended_ns) for row in self.rows if row.span.name in names
        ):
            covered_ns += max(0, span_ended_ns - max(started_ns, ended_ns))
            ended_ns = max(ended_ns, span_ended_ns)
        return covered_ns

    def mates(self, batch: ShownSpan) -> list[Mate]:
        """Returns the rows of a batch in order."""
        mates_by_row = {
            int(row[Attributes.ROW]): (int(row[Attributes.TOKENS]), trace_id) for (trace_id, _), row in batch.links
        }
        size = int(batch.attributes[Attributes.BATCH_SIZE])
        return [Mate(row, *mates_by_row.get(row, (0, ""))) for row in range(size)]


def read_trace(otlp: Mapping[str, Any], trace_id: str) -> Trace | None:
    """Reads the trace in OTLP JSON; None if it has no span."""
    spans = list(_spans(otlp))
    spans_of_trace = sorted(
        (span for span in spans if span.trace_id == trace_id), key=lambda span: (span.started_ns, -span.ended_ns)
    )
    span_ids = {span.span_id for span in spans_of_trace}
    children: dict[str, list[ShownSpan]] = {}
    for span in spans_of_trace:
        children.setdefault(span.parent_id if span.parent_id in span_ids else "", []).append(span)
    rows = list(_tree(children, "", 0))
    batches = sorted((span for span in spans if span.trace_id != trace_id), key=lambda span: span.started_ns)
    return Trace(trace_id, rows, batches) if rows else None


def _tree(children: Mapping[str, Sequence[ShownSpan]], parent_id: str, depth: int) -> Iterator[WaterfallRow]:
    for span in children.get(parent_id, ()):
        yield WaterfallRow(span, depth)
        yield from _tree(children, span.span_id, depth + 1)


def _spans(otlp: Mapping[str, Any]) -> Iterator[ShownSpan]:
    for resource in otlp["resourceSpans"]:
        service = str(_attributes(resource["resource"]["attributes"])["service.name"])
        yield from (_span(service, span) for scope in resource["scopeSpans"] for span in scope["spans"])


def _span(service: str, span: Mapping[str, Any]) -> ShownSpan:
    return ShownSpan(
        service=service,
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        started_ns=int(span["startTimeUnixNano"]),
        ended_ns=int(span["endTimeUnixNano"]),
        attributes=_attributes(span["attributes"]),
        events=tuple(event["name"] for event in span["events"]),
        links=tuple(((link["traceId"], link["spanId"]), _attributes(link["attributes"])) for link in span["links"]),
    )


def _attributes(attributes: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for attribute in attributes:
        ((kind, value),) = attribute["value"].items()
        values[attribute["key"]] = int(value) if kind == "intValue" else value
    return values


_BAR_WIDTH = 48
_MAX_MATES = 16
_LABELS = {Spans.PREPROCESS: "pre-process", Spans.PREDICT: "prediction", Spans.POSTPROCESS: "post-process"}


def draw(trace: Trace, client_ns: int) -> Iterator[str]:
    """Yields the lines of a waterfall. `client_ns`: the caller's waiting time."""
    root = trace.root
    yield f"trace {trace.trace_id}   {_heading(trace)}"
    yield ""
    # The name of an rpc without its package.
    labels = [("  " * row.depth + row.span.name.rpartition("/")[2], row) for row in trace.rows]
    label_width = max(len(label) for label, _ in labels)
    service_width = max(len(row.span.service) for _, row in labels)
    for label, row in labels:
        bar = _bar(row, root)
        yield (
            f"{label:{label_width}}  {row.span.service:{service_width}} |{bar}| {row.span.duration_ns / 1e6:9.3f} "
            f"ms{_marks(row.span)}"
        )
    yield ""
    yield split(trace)
    yield from _first_token(trace)
    outside_ms = (client_ns - root.duration_ns) / 1e6
    yield (
        f"the caller waited {client_ns / 1e6:.3f} ms: {outside_ms:.3f} ms of it outside of the gateway's span "
        "(network, gRPC)"
    )
    for batch in trace.batches:
        yield ""
        yield _describe_batch(batch)
        yield from _describe_mates(trace, batch)


def _heading(trace: Trace) -> str:
    """Returns the request's model and task."""
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
    """Returns the share of each stage in the request's time."""
    parts, total_ns = trace.parts_ns(), max(1, trace.root.duration_ns)

    def share(name: str) -> str:
        return f"{100 * parts[name] / total_ns:.1f} %"

    hop_ns = parts[Spans.PREDICT] - parts[Spans.QUEUE] - parts[Spans.COMPUTE]
    inside = f"queue {share(Spans.QUEUE)}, compute {share(Spans.COMPUTE)}, hop {100 * hop_ns / total_ns:.1f} %"
    stages = (
        f"{label} {share(name)}" + (f" ({inside})" if name == Spans.PREDICT else "") for name, label in _LABELS.items()
    )
    return f"{' + '.join(stages)} + unattributed {share('unattributed')} = {trace.root.duration_ns / 1e6:.3f} ms"


def _first_token(trace: Trace) -> Iterator[str]:
    """Yields a line for a generated text: the parts of the time to its first token, and the time between the others."""
    attributes = trace.root.attributes
    if Attributes.FIRST_TOKEN_NS not in attributes:
        return
    parts_ns, total_ns = trace.parts_ns(), int(attributes[Attributes.FIRST_TOKEN_NS])
    split_ns = {
        "pre-process": parts_ns[Spans.PREPROCESS],
        "queue": parts_ns[Spans.QUEUE],
        "prefill": int(attributes[Attributes.PREFILL_NS]),
    }
    split_ns["hops"] = total_ns - sum(split_ns.values())
    split_text = " + ".join(f"{name} {part_ns / 1e6:.3f}" for name, part_ns in split_ns.items())
    texts = [row.span.attributes for row in trace.rows if Attributes.GENERATED_TOKENS in row.span.attributes]
    tokens = max((int(text[Attributes.GENERATED_TOKENS]) for text in texts), default=1)
    token_ns = int(attributes[Attributes.DECODE_NS]) / max(1, tokens - 1)
    yield (
        f"first token after {total_ns / 1e6:.3f} ms = {split_text}; then {tokens - 1} tokens, {token_ns / 1e6:.3f} ms "
        f"each, the longest gap {int(attributes[Attributes.LONGEST_GAP_NS]) / 1e6:.3f} ms"
    )


def _describe_batch(batch: ShownSpan) -> str:
    """Returns a line about a batch, or about a step of texts that are generated."""
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


def _describe_mates(trace: Trace, batch: ShownSpan) -> Iterator[str]:
    """Yields a line for each row of a batch."""
    mates = trace.mates(batch)
    unknown = "a request that is not sampled" if Attributes.BUCKET_TOKENS in batch.attributes else "another text"
    for mate in mates[:_MAX_MATES]:
        request_name = "this request" if mate.trace_id == trace.trace_id else f"trace {mate.trace_id}"
        yield f"  row {mate.row:3}  {f'{mate.tokens:4} tokens  {request_name}' if mate.trace_id else unknown}"
    if len(mates) > _MAX_MATES:
        yield f"  and {len(mates) - _MAX_MATES} more"


def _marks(span: ShownSpan) -> str:
    """Returns the error of a span, and its events except the first token, which is in the split."""
    error = span.attributes.get(Attributes.ERROR_TYPE)
    words = [*(event for event in span.events if event != Events.FIRST_TOKEN), *([str(error)] if error else [])]
    return f"  ! {', '.join(words)}" if words else ""


def _bar(row: WaterfallRow, root: ShownSpan) -> str:
    scale = _BAR_WIDTH / max(1, root.duration_ns)
    begin = min(_BAR_WIDTH - 1, max(0, int((row.span.started_ns - root.started_ns) * scale)))
    end = min(_BAR_WIDTH, max(begin + 1, round((row.span.ended_ns - root.started_ns) * scale)))
    return " " * begin + "█" * (end - begin) + " " * (_BAR_WIDTH - end)
