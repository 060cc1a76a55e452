"""Who is at the other end of a call, by its metadata or by the certificate of its connection."""

from collections.abc import Collection

from neuronpipe.core.logs import log_warning
from neuronpipe.core.names import ON_BEHALF
from neuronpipe.platform.process.door import Credentials
from neuronpipe.rpc.transport import CallEnd, ServerCall

_PERMISSION_DENIED = 7  # google.rpc.Code


def credentials_of(call: ServerCall) -> Credentials:
    """What a caller shows: metadata, or else the names of the certificate of its connection."""
    authorization = on_behalf = ""
    for key, value in call.metadata:
        if key == "authorization":
            authorization = authorization or str(value)
        elif key == ON_BEHALF:
            on_behalf = str(value)
    return Credentials(authorization, () if authorization else tuple(call.peer_names()), on_behalf)


def check_peer(call: ServerCall, allowed: Collection[str]) -> None:
    """Raises CallEnd where a caller has none of these names; where there are none, everybody may call."""
    if not allowed:
        return
    names = call.peer_names()
    if not any(name in allowed for name in names):
        log_warning("a caller is not among the allowed peers", peer=call.peer, names=list(names))
        raise CallEnd(_PERMISSION_DENIED, "the caller's certificate has no name of an allowed peer")
