"""Makes OpenTelemetry's exporters of OTLP, which read OTEL_EXPORTER_OTLP_* themselves."""

from typing import Any

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from neuronpipe.platform.telemetry.environment import Environment


def metric_exporter(environment: Environment) -> MetricExporter:
    """Returns the exporter of metrics for the protocol."""
    if environment.metrics == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

    return HttpExporter(session=_session(environment))


def span_exporter(environment: Environment) -> SpanExporter:
    """Returns the exporter of spans for the protocol."""
    if environment.traces == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(session=_session(environment))


def _session(environment: Environment) -> Any:
    """Returns the session of an exporter; None if OpenTelemetry gets it from a credential provider."""
    if environment.has_credential_provider:
        return None
    from neuronpipe.platform.telemetry.otlp_http import bounded_session

    return bounded_session()
