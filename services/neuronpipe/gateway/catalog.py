"""The models being served, as ModelService describes them."""

from neuronpipe.api.v1.models_pb2 import GetModelRequest, GetModelResponse, ListModelsResponse, Model
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelTable


class Catalog:
    """Answers ModelService's questions."""

    def __init__(self, bundles: list[Bundle]) -> None:
        self._bundles = ModelTable({bundle.key: bundle for bundle in bundles})

    def list_models(self) -> ListModelsResponse:
        """Every version of every model."""
        return ListModelsResponse(models=[self._describe(bundle) for bundle in self._bundles])

    def get_model(self, request: GetModelRequest) -> GetModelResponse:
        """One model. Raises ModelNotFound and InvalidInput."""
        if not request.name:
            raise InvalidInput("name", "is empty")
        return GetModelResponse(model=self._describe(self._bundles.find(request.name, request.version)))

    def _describe(self, bundle: Bundle) -> Model:
        spec, artifacts = bundle.spec, bundle.manifest.artifacts
        return Model(
            name=spec.name,
            version=str(spec.version),
            is_default=self._bundles.is_newest(*bundle.key),
            task=spec.task,
            tasks=spec.tasks,
            labels=spec.labels,
            max_tokens=spec.max_tokens,
            embedding_dimensions=spec.embedding_dimensions,
            architecture=spec.architecture,
            backends=[artifact.backend for artifact in artifacts],
            dtype=artifacts[0].dtype,
            digest=bundle.digest,
            mask_token=spec.mask_token,
        )
