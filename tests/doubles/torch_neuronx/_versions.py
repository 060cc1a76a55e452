"""The release of the SDK that the double stands for, and the comparison of versions."""

import os
import re

SDK = os.environ.get("NEURON_DOUBLE_SDK", "2.31")
_VERSIONS = {
    "2.24": "2.7.0.2.8.6734",
    "2.26": "2.8.0.2.10.13553",
    "2.29": "2.9.0.2.13.24727",
    "2.31": "2.9.0.2.15.32035",
}
VERSION = _VERSIONS[SDK] + "+double"


def ordered(version: str) -> tuple[int, ...]:
    """Converts a version to numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


HAS_PLACEMENT = ordered(SDK) >= (2, 25)
# SDK 2.27 casts nothing by default, before it cast matrix multiplications.
DEFAULT_AUTO_CAST = "none" if ordered(SDK) >= (2, 27) else "matmult"
