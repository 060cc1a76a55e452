"""Where spans and metrics go: OTLP, a Prometheus port, and the memory of development servers. Only here is the OpenTelemetry SDK known."""
