"""The models being served, as ModelService describes them."""

from neuronpipe.api.v1.models_pb2 import GetModelRequest, GetModelResponse, ListModelsResponse, Model, VersionState
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.callers import current_caller
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import ModelKey
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.gateway.routing import GatewayModel, GatewayModels, VersionRouter
from neuronpipe.gateway.tenants.tenants import Tenants


class Catalog:
    """Answers ModelService's questions about the models that the caller of the running task may use."""

    def __init__(
        self, models: GatewayModels, tenants: Tenants | None = None, router: VersionRouter | None = None
    ) -> None:
        """`router`: describes the states of versions; None where versions do not change."""
        self.models = models
        self.router = router
        self._tenants = tenants

    @property
    def served(self) -> ModelTable[ServedModel[GatewayModel]]:
        """The models that the caller may use; the same table for the same models."""
        table = self.models.table
        return self._tenants.table_of(current_caller(), table) if self._tenants else table

    def list_models(self) -> ListModelsResponse:
        """Returns every version of every model, also versions that should be served and are not."""
        described = {model.key: self._describe(model.bundle) for model in self.served}
        if self.router:
            names = self._tenants.models_of(current_caller()) if self._tenants else None
            described |= {
                key: self.router.describe(key) for key in self.router.missing if names is None or key.name in names
            }
        return ListModelsResponse(models=[described[key] for key in sorted(described)])

    @property
    def unloaded(self) -> list[ModelKey]:
        """The versions that the caller could use if their models were loaded."""
        names = self._tenants.models_of(current_caller()) if self._tenants else None
        unloaded = self.router.unloaded if self.router else []
        return [key for key in unloaded if names is None or key.name in names]

    def get_model(self, request: GetModelRequest) -> GetModelResponse:
        """Returns one model. Raises ModelNotFound and InvalidInput."""
        if not request.name:
            raise InvalidInput("name", "is empty")
        return GetModelResponse(model=self._describe(self.served.find(request.name, request.version).bundle))

    def spec(self, name: str, version: str = "") -> ModelSpec:
        """Returns a version of a model, or the newest. Raises ModelNotFound and InvalidInput."""
        return self.served.find(name, version).bundle.spec

    def names(self, task: str = "") -> list[str]:
        """Returns the models that have a task, or all of them."""
        specs = (model.bundle.spec for model in self.served)
        return list(dict.fromkeys(spec.name for spec in specs if not task or spec.answers(task)))

    def _describe(self, bundle: Bundle) -> Model:
        spec, artifacts = bundle.spec, bundle.manifest.artifacts
        model = Model(
            name=spec.name,
            version=str(spec.version),
            is_default=self.served.is_default(*bundle.key),
            task=spec.task,
            tasks=spec.tasks,
            labels=spec.labels,
            max_tokens=spec.max_tokens,
            architecture=spec.architecture,
            backends=[artifact.backend for artifact in artifacts],
            dtype=artifacts[0].dtype,
            digest=bundle.digest,
            **spec.public_facts,
        )
        if self.router:
            model.MergeFrom(self.router.describe(ModelKey(*bundle.key)))
        else:
            model.state, model.is_desired = VersionState.VERSION_STATE_READY, True
            model.share = float(model.is_default)
        return model
