"""The caller's API key or token, as metadata of its calls."""

import os
from collections.abc import Sequence

from neuronpipe.core.errors import SetupError

VARIABLE = "NEURONPIPE_API_KEY"


def key_metadata(api_key: str | None = None) -> Sequence[tuple[str, str]]:
    """The metadata that shows a key or a token (JWT); none for an empty one. `api_key`: None for the environment's.

    Raises SetupError for what metadata cannot hold.
    """
    key = (os.environ.get(VARIABLE, "") if api_key is None else api_key).strip()
    if not (key.isascii() and key.isprintable()):
        raise SetupError(f"the API key ({VARIABLE}) holds characters that no key has")
    return [("authorization", f"Bearer {key}")] if key else []
