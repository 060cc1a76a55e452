"""gRPC: how servers listen and stop, and how channels and stubs are opened. Knows no task and no model."""
