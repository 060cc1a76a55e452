"""The Python client: `AsyncClient`, `Client` for code without asyncio, and what they raise. Needs gRPC, protobuf and NumPy only."""

from neuronpipe.client.asynchronous import AsyncClient
from neuronpipe.client.synchronous import Client
from neuronpipe.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    ModelNotFound,
    NeuronpipeError,
    Overloaded,
    Unavailable,
    WrongTask,
)

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "InternalError",
    "InvalidInput",
    "ModelNotFound",
    "NeuronpipeError",
    "Overloaded",
    "Unavailable",
    "WrongTask",
]
