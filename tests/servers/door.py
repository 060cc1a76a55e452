"""A gateway's native door over stages that a test wrote, called with messages of the API."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from neuronpipe.api.forward.v1 import inference_pb2 as wire
from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferBatchResponse,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.bundles.manifest import SCHEMA_VERSION, Artifact, Manifest, Source
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.calls import Call
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.results import ResultCache
from neuronpipe.gateway.routing import GatewayModels, open_gateway_models
from neuronpipe.gateway.settings import PipelineSettings


def bundle_of(spec: ModelSpec) -> Bundle:
    """Makes a bundle that is on no disk."""
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model=spec,
        source=Source(location="", weights_sha256=""),
        artifacts=(Artifact(backend="fake", dtype="float32"),),
        files={},
    )
    return Bundle(Path(spec.name, str(spec.version)), manifest, "")


def models_of(
    specs: Iterable[ModelSpec], telemetry: Telemetry, aliases: Mapping[str, str] = MappingProxyType({})
) -> GatewayModels:
    """Makes a gateway's table of these models."""
    models = open_gateway_models(telemetry.meters, lambda bundle: False, aliases)
    for spec in specs:
        opening = models.open(bundle_of(spec))
        with suppress(StopIteration):  # opening one waits for nothing
            opening.send(None)
    return models


@dataclass(frozen=True, slots=True)
class Door:
    """Takes and gives messages of neuronpipe.api.v1, as callers do."""

    native: NativeDoor

    async def infer(self, request: InferRequest, call: Call) -> InferResponse:
        answer: InferResponse = _read(InferResponse, await self.native.infer(_read(wire.InferRequest, request), call))
        return answer

    async def infer_batch(self, request: InferBatchRequest, call: Call) -> InferBatchResponse:
        message = _read(wire.InferBatchRequest, request)
        answer: InferBatchResponse = _read(InferBatchResponse, await self.native.infer_batch(message, call))
        return answer

    async def infer_stream(
        self, requests: AsyncIterable[InferStreamRequest], call: Call
    ) -> AsyncIterator[InferStreamResponse]:
        messages = (_read(wire.InferStreamRequest, request) async for request in requests)
        answers = self.native.infer_stream(messages, call)
        try:
            async for response in answers:
                yield _read(InferStreamResponse, response)
        finally:
            await answers.aclose()  # type: ignore[attr-defined]


def door_of(
    specs: Iterable[ModelSpec],
    stages: Stages,
    settings: PipelineSettings | None = None,
    telemetry: Telemetry | None = None,
    results: ResultCache | None = None,
) -> Door:
    """Makes the door of a gateway with these models."""
    settings, telemetry = settings or PipelineSettings(), telemetry or Telemetry()
    return door_over(models_of(specs, telemetry), stages, settings, telemetry, results)


def door_over(
    models: GatewayModels,
    stages: Stages,
    settings: PipelineSettings,
    telemetry: Telemetry,
    results: ResultCache | None = None,
) -> Door:
    """Makes the door of a gateway with a table of models."""
    return Door(NativeDoor(Pipeline(models, stages, settings, telemetry, results), Catalog(models), settings))


def _read(kind: Any, message: Message) -> Any:
    return kind.FromString(message.SerializeToString())
