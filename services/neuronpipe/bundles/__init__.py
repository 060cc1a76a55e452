"""Compiled models on disk: their format, the repository that holds them, and the compiler."""
