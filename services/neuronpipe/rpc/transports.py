"""Chooses the transport of gRPC, as the setting says."""

from neuronpipe.platform.tls import LoadedTls
from neuronpipe.rpc.transport import Channel, Server, ServerOptions


def make_server(options: ServerOptions) -> Server:
    """A server for one address."""
    if options.settings.grpc_transport == "grpcio":
        from neuronpipe.rpc.grpcio import GrpcioServer

        return GrpcioServer(options)
    from neuronpipe.rpc.http2.server import Http2Server

    return Http2Server(options)


def make_channel(transport: str, address: str, tls: LoadedTls | None = None, server_name: str = "") -> Channel:
    """A channel to one address; see Http2Channel."""
    if transport == "grpcio":
        from neuronpipe.rpc.grpcio import GrpcioChannel

        return GrpcioChannel(address, tls, server_name)
    from neuronpipe.rpc.http2.client import Http2Channel

    return Http2Channel(address, tls, server_name)
