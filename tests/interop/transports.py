"""The transports of gRPC that a server can be started with."""

from neuronpipe.platform.process.settings import ProcessSettings

_SETTING = "grpc_transport"
HAS_SETTING = _SETTING in ProcessSettings.model_fields
TRANSPORTS = ("nghttp2", "grpcio") if HAS_SETTING else ("grpcio",)


def options_of(transport: str) -> tuple[str, ...]:
    """The options of a service."""
    return ("--grpc-transport", transport) if HAS_SETTING else ()
