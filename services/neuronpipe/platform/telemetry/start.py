"""Builds a service's telemetry from its settings and the standard OTEL_* variables. For cli only."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from neuronpipe import __version__
from neuronpipe.core.logs import log
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.tracing import Clock, Span, Tracer
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.telemetry.environment import Environment, read_environment
from neuronpipe.platform.telemetry.store import TraceStore
from neuronpipe.platform.tls import ServerTls, show_tls


@contextmanager
def running_telemetry(
    service: str, settings: ProcessSettings, variables: Mapping[str, str], tls: ServerTls | None = None
) -> Iterator[Telemetry]:
    """A service's telemetry, exported while the block runs. `tls`: of its ports. Raises SetupError.

    Parts that are not used are not imported.
    """
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
            sinks += _start_otlp(service, environment, clock, meters, stack)
        tracer = Tracer(sinks, ratio=environment.ratio, honours_parent=environment.honours_parent)

        def write_metrics(accept: str) -> tuple[bytes, str]:
            from neuronpipe.platform.telemetry.prometheus import write_page

            return write_page(meters, accept)

        telemetry = Telemetry(tracer, meters, store, write_metrics)
        if settings.metrics_listen:
            from neuronpipe.platform.telemetry.prometheus import MetricsPort

            port = MetricsPort(settings.metrics_listen, meters, tls, lambda given: telemetry.may_read_metrics(given))
            stack.callback(port.close)
            log("metrics", address=port.address)
        yield telemetry


def _start_otlp(
    service: str, environment: Environment, clock: Clock, meters: Meters, stack: ExitStack
) -> list[Callable[[Span], None]]:
    from opentelemetry.sdk.resources import Resource

    names = {"service.namespace": "neuronpipe", "service.version": __version__}
    if not environment.has_service_name:
        names["service.name"] = service
    resource = Resource.create(names)  # with OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME
    if environment.metrics:
        from neuronpipe.platform.telemetry.otlp_metrics import MetricExport

        stack.callback(MetricExport(environment.metrics, resource, meters, environment.metric_interval_s).close)
    if not environment.traces:
        return []
    from neuronpipe.platform.telemetry.spans import SpanQueue, otlp_exporter

    queue = SpanQueue(otlp_exporter(environment.traces), resource, clock, meters, environment.max_queue_spans)
    stack.callback(queue.close)
    return [queue.add]
