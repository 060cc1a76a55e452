"""gRPC: servers that listen and stop, and clients that open channels and stubs. Knows no task and no model."""
