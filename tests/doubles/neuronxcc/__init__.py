"""The compiler's package, of which the version is all that anybody reads."""

import os

_VERSIONS = {"2.24": "2.19.8089", "2.26": "2.21.18209", "2.29": "2.24.5133", "2.31": "2.26.6360"}

__version__ = _VERSIONS[os.environ.get("NEURON_DOUBLE_SDK", "2.31")] + "+double"
