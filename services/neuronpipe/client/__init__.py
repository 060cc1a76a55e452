"""The Python client: `AsyncClient`, and `Client` for code without asyncio. Needs gRPC, protobuf and NumPy only."""

from neuronpipe.client.asynchronous import AsyncClient
from neuronpipe.client.synchronous import Client

__all__ = ["AsyncClient", "Client"]
