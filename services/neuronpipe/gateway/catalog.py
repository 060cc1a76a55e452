"""The models being served, as ModelService describes them."""

from neuronpipe.api.v1.models_pb2 import GetModelRequest, GetModelResponse, ListModelsResponse, Model
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.models import GatewayModels


class Catalog:
    """Answers ModelService's questions."""

    def __init__(self, models: GatewayModels) -> None:
        self._models = models

    def list_models(self) -> ListModelsResponse:
        """Every version of every model."""
        return ListModelsResponse(models=[self._describe(model.bundle) for model in self._models.table])

    def get_model(self, request: GetModelRequest) -> GetModelResponse:
        """One model. Raises ModelNotFound and InvalidInput."""
        if not request.name:
            raise InvalidInput("name", "is empty")
        return GetModelResponse(model=self._describe(self._models.table.find(request.name, request.version).bundle))

    def spec(self, name: str) -> ModelSpec:
        """The newest version of a model. Raises ModelNotFound and InvalidInput."""
        return self._models.table.find(name, "").bundle.spec

    def names(self, task: str = "") -> list[str]:
        """The models that have a task, or all of them."""
        specs = (model.bundle.spec for model in self._models.table)
        return list(dict.fromkeys(spec.name for spec in specs if not task or task in spec.tasks))

    def _describe(self, bundle: Bundle) -> Model:
        spec, artifacts = bundle.spec, bundle.manifest.artifacts
        return Model(
            name=spec.name,
            version=str(spec.version),
            is_default=self._models.table.is_newest(*bundle.key),
            task=spec.task,
            tasks=spec.tasks,
            labels=spec.labels,
            max_tokens=spec.max_tokens,
            architecture=spec.architecture,
            backends=[artifact.backend for artifact in artifacts],
            dtype=artifacts[0].dtype,
            digest=bundle.digest,
            **spec.told_facts,
        )
