"""The same pipeline behind the same five methods, in this process or behind a gateway."""

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.config import AllSettings
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Call
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.local import local_stages


class System(Protocol):
    """What the behaviour suite talks to; AsyncClient is one."""

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse: ...

    async def infer_batch(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> Sequence[InferOutcome]: ...

    def infer_stream(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> AsyncIterator[InferStreamResponse]: ...

    async def list_models(self) -> Sequence[Model]: ...

    async def get_model(self, name: str, version: str = "") -> Model: ...


class LocalSystem:
    """The pipeline in this process, without gRPC."""

    def __init__(self, pipeline: Pipeline, catalog: Catalog) -> None:
        self._pipeline = pipeline
        self._catalog = catalog

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        return await self._pipeline.infer(request, _call(timeout_s))

    async def infer_batch(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        return (await self._pipeline.infer_batch(InferBatchRequest(requests=requests), _call(timeout_s))).outcomes

    def infer_stream(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> AsyncIterator[InferStreamResponse]:
        async def messages() -> AsyncIterator[InferStreamRequest]:
            for request in requests:
                yield InferStreamRequest(request=request)

        return self._pipeline.infer_stream(messages(), _call(timeout_s))

    async def list_models(self) -> Sequence[Model]:
        return self._catalog.list_models().models

    async def get_model(self, name: str, version: str = "") -> Model:
        return self._catalog.get_model(GetModelRequest(name=name, version=version)).model


def _call(timeout_s: float | None) -> Call:
    return Call(deadline_s=None if timeout_s is None else time.monotonic() + timeout_s)


@asynccontextmanager
async def local_system(repository: Path) -> AsyncIterator[System]:
    """A pipeline over local stages."""
    settings = AllSettings(repository=repository)
    bundles = read_repository(repository)
    async with local_stages(bundles, settings, settings) as stages:
        models = ModelTable({bundle.key: bundle.spec for bundle in bundles})
        yield LocalSystem(Pipeline(models, stages, settings), Catalog(bundles))
