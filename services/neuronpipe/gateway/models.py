"""The data that a gateway holds for each model that it serves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.request_observer import ModelMeters


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """One version of a model. `digest`: that of its bundle if its results are cached; otherwise empty."""

    key: ModelKey
    spec: ModelSpec
    meters: ModelMeters
    digest: str = ""


GatewayModels = ServedModels[GatewayModel]


def open_gateway_models(meters: Meters, keeps_results: Callable[[Bundle], bool]) -> GatewayModels:
    """An empty table. `keeps_results` tells whether a model's results are cached."""

    @asynccontextmanager
    async def open_model(bundle: Bundle) -> AsyncIterator[GatewayModel]:
        key = ModelKey(*bundle.key)
        yield GatewayModel(key, bundle.spec, ModelMeters(meters, key), bundle.digest if keeps_results(bundle) else "")

    return ServedModels(open_model)
