"""The names that telemetry uses. Defined here and nowhere else."""

# W3C Trace Context, https://www.w3.org/TR/trace-context/: gRPC carries both as metadata under these keys.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
