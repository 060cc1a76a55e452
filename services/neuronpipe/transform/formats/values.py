"""Values of results and of kept columns, for formats that have no such types."""

import base64
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A value that is none of JSON's: bytes as Base64, a scalar of Arrow as Python's, others (dates, decimals) as text."""
    if hasattr(value, "as_py"):
        return value.as_py()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):  # not contiguous, or of a type that orjson does not write
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
