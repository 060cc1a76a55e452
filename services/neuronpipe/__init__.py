"""Hugging Face Transformers served over gRPC as a pipeline of separate services."""

__version__ = "0.1.0"
