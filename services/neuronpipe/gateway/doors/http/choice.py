"""Which model answers a request that may name none, as in protocols of servers of one model."""

from neuronpipe.core.errors import InvalidInput, ModelNotFound, SetupError
from neuronpipe.gateway.catalog import Catalog


class ModelChoice:
    """Finds models by task. `defaults`: names with commas, the first that has the task wins."""

    def __init__(self, catalog: Catalog, defaults: str) -> None:
        """Raises SetupError for a default that is not served."""
        self._catalog = catalog
        self._defaults = [name for name in map(str.strip, defaults.split(",")) if name]
        served = catalog.names()
        for name in self._defaults:
            if name not in served:
                raise SetupError(f"http_default_models: {name} is not served; served are: {', '.join(served)}")

    def choose(self, given: str | None, task: str = "") -> str:
        """The model that a request names, or else a default one, or the only one that has the task.

        Raises NeuronpipeError.
        """
        if given:
            return given
        names = self._catalog.names(task)
        what = f"the task {task}" if task else "any task"
        if not names:
            raise ModelNotFound(f"no model has {what}")
        for name in self._defaults:
            if name in names:
                return name
        if len(names) > 1:
            raise InvalidInput("model", f"is missing; several models have {what}: {', '.join(names)} (or set http_default_models)")
        return names[0]
