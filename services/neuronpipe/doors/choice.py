"""Which model answers a request that may name none, as in protocols of servers of one model; and what a request says
beside its protocol: over HTTP in headers, over gRPC in metadata.
"""

from typing import NamedTuple

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.errors import InvalidInput, ModelNotFound, SetupError
from neuronpipe.gateway.catalog import Catalog

MODEL_FIELD = "neuronpipe-model"
VERSION_FIELD = "neuronpipe-version"
PRIORITY_FIELD = "neuronpipe-priority"
_PRIORITIES = {
    "": Priority.PRIORITY_INTERACTIVE,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}


class ModelName(NamedTuple):
    """A model in a caller's words. Without a name a default one answers, without a version the newest."""

    name: str
    version: str = ""


class ModelChoice:
    """Finds models by task. `defaults`: names with commas, the first that has the task wins."""

    def __init__(self, catalog: Catalog, defaults: str) -> None:
        """Raises SetupError for a default that is not served."""
        self._catalog = catalog
        self._defaults = [name for name in map(str.strip, defaults.split(",")) if name]
        served = catalog.names()
        for name in self._defaults:
            if name not in served:
                raise SetupError(f"default_models: {name} is not served; served are: {', '.join(served)}")

    def choose(self, given: ModelName, task: str = "") -> ModelName:
        """The model that a request names, or else a default one, or the only one that has the task.

        Raises NeuronpipeError.
        """
        if given.name:
            return given
        names = self._catalog.names(task)
        what = f"the task {task}" if task else "any task"
        if not names:
            raise ModelNotFound(f"no model has {what}")
        for name in self._defaults:
            if name in names:
                return ModelName(name, given.version)
        if len(names) > 1:
            raise InvalidInput(
                "model", f"is missing; several models have {what}: {', '.join(names)} (or set default_models)"
            )
        return ModelName(names[0], given.version)


def read_priority(word: str) -> "Priority.ValueType":
    """The priority that a word stands for. Raises InvalidInput."""
    if word not in _PRIORITIES:
        raise InvalidInput(PRIORITY_FIELD, "must be interactive or bulk")
    return _PRIORITIES[word]
