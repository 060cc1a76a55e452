"""Which model answers a request that may name none, as in protocols of servers of one model."""

from collections.abc import Sequence

from neuronpipe.core.errors import InvalidInput, ModelNotFound
from neuronpipe.gateway.catalog import Catalog


class ModelChoice:
    """Finds models by task. `defaults`: names, the first that has the task wins."""

    def __init__(self, catalog: Catalog, defaults: Sequence[str]) -> None:
        self._catalog = catalog
        self._defaults = defaults

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
