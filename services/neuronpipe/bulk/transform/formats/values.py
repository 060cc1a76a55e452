"""Values of results and of kept columns, for formats that have no such types."""

import base64
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """JSON for what is none of its values: bytes as Base64, scalars of Arrow as Python's, dates as text."""
    if hasattr(value, "as_py"):
        # Python's own times have no nanoseconds; pyarrow gives those of pandas where that is installed.
        return (value.cast("string") if "[ns" in str(value.type) else value).as_py()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray):  # not contiguous, or of a type that orjson does not write
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
