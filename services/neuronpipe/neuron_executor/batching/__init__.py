"""How batches come about: what waits (queue), which of it runs together (policies), and how long that takes (forecast)."""
