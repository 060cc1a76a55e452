"""Who is at the other end of a connection, by its certificate, and TLS as gRPC's servers want it."""

from collections.abc import Collection, Iterable

import grpc

from neuronpipe.core.logs import log_warning
from neuronpipe.core.names import ON_BEHALF
from neuronpipe.platform.process.door import Credentials
from neuronpipe.platform.tls.files import LoadedTls
from neuronpipe.platform.tls.server import ServerTls
from neuronpipe.rpc.rpcs import Context


def peer_names(context: Context) -> list[str]:
    """The subject alternative names of the caller's certificate, which has been verified: DNS names, IP addresses, URIs
    such as SPIFFE ids. Empty where the caller has shown no certificate.
    """
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return [name.decode(errors="replace") for name in names]


def credentials_of(context: Context, metadata: Iterable[tuple[str, str | bytes]]) -> Credentials:
    """What a caller shows: metadata, or else the names of the certificate of its connection."""
    authorization = on_behalf = ""
    for key, value in metadata:
        if key == "authorization":
            authorization = authorization or str(value)
        elif key == ON_BEHALF:
            on_behalf = str(value)
    return Credentials(authorization, () if authorization else tuple(peer_names(context)), on_behalf)


async def check_peer(context: Context, allowed: Collection[str]) -> None:
    """Ends a call with PERMISSION_DENIED where its caller has none of these names; where there are none, everybody may
    call.
    """
    if not allowed:
        return
    names = peer_names(context)
    if not any(name in allowed for name in names):
        log_warning("a caller is not among the allowed peers", peer=context.peer(), names=names)
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "the caller's certificate has no name of an allowed peer"
        )


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that show the current certificate at each handshake."""
    taken = tls.watched.value

    def take_current() -> "grpc.ServerCertificateConfiguration | None":
        # gRPC calls it in threads of its own, so it only looks at what is loaded.
        nonlocal taken
        current = tls.watched.value
        if current is taken:
            return None
        taken = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        take_current,  # type: ignore[arg-type]  # None, for no change, is missing in its types
        require_client_authentication=tls.asks_for_certificates,
    )


def _configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    assert loaded.key  # noqa: S101 (every server side has both)
    assert loaded.certificate  # noqa: S101
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], root_certificates=loaded.ca)
