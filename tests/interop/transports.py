"""The transports of gRPC that a service can be started with."""

TRANSPORTS = ("nghttp2", "grpcio")


def options_of(transport: str) -> tuple[str, ...]:
    """The options of a service."""
    return ("--grpc-transport", transport)
