"""Compiled models on disk and in a process: their format, signatures, repositories, and the registry of versions."""
