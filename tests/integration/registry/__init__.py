"""Versions of models: the registry, canaries, models on demand."""
