"""The lifecycle of a process: signals, loading, health, draining, and calls in flight."""
