"""The caller's API key or token, as metadata of its calls."""

import os
from collections.abc import Sequence

from neuronpipe.core.addresses import is_loopback
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning

VARIABLE = "NEURONPIPE_API_KEY"


def key_metadata(api_key: str | None = None, *, target: str, is_encrypted: bool) -> Sequence[tuple[str, str]]:
    """The metadata that shows a key or a token (JWT); none for an empty one. `api_key`: None for the environment's.

    Warns where it would be sent to another machine in plain text. Raises SetupError for what metadata cannot hold.
    """
    key = (os.environ.get(VARIABLE, "") if api_key is None else api_key).strip()
    if not (key.isascii() and key.isprintable()):
        raise SetupError(f"the API key ({VARIABLE}) holds characters that no key has")
    if key and not is_encrypted and not all(map(_is_local, target.split(","))):
        log_warning("an API key is sent in plain text: use TLS, or any machine on the way can read it", target=target)
    return [("authorization", f"Bearer {key}")] if key else []


def _is_local(target: str) -> bool:
    address = target.strip().removeprefix("dns:///")
    return is_loopback(address if ":" in address else f"{address}:0")
