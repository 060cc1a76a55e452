"""The life of a process: signals, loading, health, draining, and what is in flight."""
