"""Exports spans and metrics: OTLP, a Prometheus port, kept traces. Only this package imports the OpenTelemetry SDK."""
