"""Deploys a model to an endpoint: in containers of this machine, on Kubernetes, or on Amazon SageMaker."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuronpipe.deploy.endpoint import ServerlessConfig
    from neuronpipe.deploy.model import HuggingFaceModel

__all__ = ["HuggingFaceModel", "ServerlessConfig"]

_MODULES = {"HuggingFaceModel": "model", "ServerlessConfig": "endpoint"}


def __getattr__(name: str) -> Any:
    """Imports a class when it is first used: checks.py, which runs before every service, needs none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
