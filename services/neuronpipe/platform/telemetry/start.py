"""Builds a service's telemetry from its settings and the standard OTEL_* variables. For cli only."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, TypeAlias

from neuronpipe import __version__
from neuronpipe.core.errors import SetupError, first_line
from neuronpipe.core.logs import log
from neuronpipe.core.metrics import MayRead, Meters, Telemetry
from neuronpipe.core.tracing import AttributeValue, Clock, Span, SpanContext, Tracer
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.telemetry.environment import Environment, read_environment
from neuronpipe.platform.tls import ServerTls, show_tls


@contextmanager
def running_telemetry(
    service: str, settings: ProcessSettings, variables: MutableMapping[str, str], tls: ServerTls | None = None
) -> Iterator[Telemetry]:
    """Yields a service's telemetry, exported while the block runs. `tls`: for its ports. Raises SetupError.

    Unused parts are not imported. Empty variables of OpenTelemetry are removed from `variables`: by its specification
    they count as unset, and its libraries fail on some.
    """
    for name in [name for name, text in variables.items() if name.startswith("OTEL_") and not text]:
        del variables[name]
    environment = read_environment(variables)
    clock, meters = Clock(), Meters()
    if tls:
        show_tls(meters, "server", tls.watched)
    sinks: list[Callable[[Span], None]] = []
    store = TraceStore(settings.kept_traces, service, clock) if settings.kept_traces else None
    if store:
        sinks.append(store.add)
    with ExitStack() as stack:
        if environment.traces or environment.metrics:
            try:
                sinks += _start_otlp(service, environment, clock, meters, stack)
            except (ModuleNotFoundError, SetupError):
                raise
            except Exception as error:  # OpenTelemetry raises errors of many kinds for the variables that it reads
                names = ", ".join(sorted(name for name in variables if name.startswith("OTEL_")))
                raise SetupError(f"{names}: OpenTelemetry cannot use one of these: {first_line(error)}") from error
        tracer = Tracer(sinks, ratio=environment.ratio, honours_parent=environment.honours_parent)

        def write_metrics(accept: str) -> tuple[bytes, str]:
            from neuronpipe.platform.telemetry.prometheus import write_page

            return write_page(meters, accept)

        yield Telemetry(
            tracer, meters, store, write_metrics, partial(_metrics_port, settings.metrics_listen, meters, tls)
        )


@contextmanager
def _metrics_port(listen: str, meters: Meters, tls: ServerTls | None, may_read: MayRead) -> Iterator[None]:
    """Shows the metrics to Prometheus while the block runs. `listen`: empty for no port. Raises SetupError."""
    if not listen:
        yield
        return
    from neuronpipe.platform.telemetry.prometheus import MetricsPort

    port = MetricsPort(listen, meters, tls, may_read)
    log("metrics", address=port.address)
    with closing(port):
        yield


def _start_otlp(
    service: str, environment: Environment, clock: Clock, meters: Meters, stack: ExitStack
) -> list[Callable[[Span], None]]:
    from opentelemetry.sdk.resources import Resource

    names = {"service.namespace": "neuronpipe", "service.version": __version__}
    if not environment.has_service_name:
        names["service.name"] = service
    resource = Resource.create(names)  # includes OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME
    from neuronpipe.platform.telemetry.exporters import metric_exporter, span_exporter

    if environment.metrics:
        from neuronpipe.platform.telemetry.otlp_metrics import MetricExport

        exporter = metric_exporter(environment)
        stack.callback(MetricExport(exporter, resource, meters, environment.metric_interval_s).close)
    if not environment.traces:
        return []
    from neuronpipe.platform.telemetry.spans import SpanQueue

    queue = SpanQueue(span_exporter(environment), resource, clock, meters, environment.max_queue_spans)
    stack.callback(queue.close)
    return [queue.add]


# Traces that a development server keeps in memory, for `neuronpipe trace`, as OTLP JSON:
# https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
Json: TypeAlias = dict[str, Any]

_KINDS = {"internal": 1, "server": 2}
_ERROR = 2


def to_otlp_json(spans: Iterable[Span], resource: Mapping[str, AttributeValue], clock: Clock) -> Json:
    """Returns the spans of one service as TracesData."""
    scope = {"scope": {"name": "neuronpipe"}, "spans": [_span(span, clock) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}


def _span(span: Span, clock: Clock) -> Json:
    fields: Json = {
        **_ids(span.context),
        "name": str(span.name),
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(clock.wall_ns(span.started_ns)),
        "endTimeUnixNano": str(clock.wall_ns(span.ended_ns)),
        "attributes": _attributes(span.attributes),
        "events": [
            {
                "name": str(event.name),
                "timeUnixNano": str(clock.wall_ns(event.at_ns)),
                "attributes": _attributes(event.attributes),
            }
            for event in span.events
        ],
        "links": [{**_ids(link.context), "attributes": _attributes(link.attributes)} for link in span.links],
        "status": {"code": _ERROR} if span.is_error else {},
    }
    if span.parent:
        fields["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.context.tracestate:
        fields["traceState"] = span.context.tracestate
    return fields


def _ids(context: SpanContext) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[Json]:
    return [{"key": str(key), "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> Json:
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


# Maximum number of spans of a trace. A trace has about ten, but a caller may send any number of requests in a trace.
_MAX_SPANS = 1024


class TraceStore:
    """Keeps a number of traces. The oldest is dropped when another one begins. A batch is a trace of its own."""

    def __init__(self, max_traces: int, service: str, clock: Clock) -> None:
        self._max_traces, self._service, self._clock = max_traces, service, clock
        self._traces: OrderedDict[int, list[Span]] = OrderedDict()

    def add(self, span: Span) -> None:
        spans = self._traces.setdefault(span.context.trace_id, [])
        if len(spans) < _MAX_SPANS:
            spans.append(span)
        if len(self._traces) > self._max_traces:
            self._traces.popitem(last=False)

    def find(self, trace_id: int) -> Json:
        """Returns a trace's spans of this process and its batches as OTLP JSON; no spans for an unknown trace."""
        spans = list(self._traces.get(trace_id, ()))
        linked = dict.fromkeys(link.context.trace_id for span in spans for link in span.links)
        batches = [span for other in linked if other != trace_id for span in self._traces.get(other, ())]
        return to_otlp_json([*spans, *batches], {"service.name": self._service}, self._clock)
