"""The same pipeline behind the same five methods, in this process or behind a gateway."""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.api.v1.models_pb2 import GetModelRequest, ListModelsRequest, Model
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.assembly import running_pipeline
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.serve.settings import AllSettings
from neuronpipe.serve.stages import running_stages
from tests.models.versions import changing_manifest, copy_bundle
from tests.servers.door import Door
from tests.suite.constants import constants

# The environment of servers over OpenVINO that live for long. An idle server computes each shape of its batches once:
# 77,000 tokens a model, which these servers leave to requests.
UNPREPARED = constants(idle_s=3600.0)
# Time of each batch of a slow model.
DEVICE_TIME_S = 1.5


class System(Protocol):
    """Interface of the systems under test in the behaviour suite. AsyncClient has it also."""

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse: ...

    async def infer_batch(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> Sequence[InferOutcome]: ...

    def infer_stream(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> AsyncIterator[InferStreamResponse]: ...

    async def list_models(self) -> Sequence[Model]: ...

    async def get_model(self, name: str, version: str = "") -> Model: ...


class LocalSystem:
    """The pipeline in this process, without gRPC."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        return await self._door.infer(request, _call(timeout_s))

    async def infer_batch(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> Sequence[InferOutcome]:
        return (await self._door.infer_batch(InferBatchRequest(requests=requests), _call(timeout_s))).outcomes

    def infer_stream(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> AsyncIterator[InferStreamResponse]:
        async def messages() -> AsyncIterator[InferStreamRequest]:
            for request in requests:
                yield InferStreamRequest(request=request)

        return self._door.infer_stream(messages(), _call(timeout_s))

    async def list_models(self) -> Sequence[Model]:
        return (await self._door.native.list_models(ListModelsRequest(), Call())).models

    async def get_model(self, name: str, version: str = "") -> Model:
        return (await self._door.native.get_model(GetModelRequest(name=name, version=version), Call())).model


def _call(timeout_s: float | None) -> Call:
    return Call(deadline_s=None if timeout_s is None else time.monotonic() + timeout_s)


@asynccontextmanager
async def local_system(repository: Path) -> AsyncIterator[System]:
    """Runs a pipeline over local stages."""
    # In this process a constant is not changed; few tokens are few shapes.
    settings = AllSettings.of(repository=repository, max_batch_tokens=128)
    limits, bundles, telemetry = settings.gateway.pipeline, read_repository(repository), Telemetry()
    results = settings.gateway.results
    async with (
        running_stages(settings, telemetry, lambda stage, is_reached: None, bundles) as stages,
        running_pipeline(stages.functions, limits, results, telemetry, bundles) as (models, pipeline),
    ):
        for bundle in bundles:
            for table in (*stages.near, models):
                await table.open(bundle)
        yield LocalSystem(Door(NativeDoor(pipeline, Catalog(models), limits)))


@contextmanager
def two_processes(repository: Path, *options: str) -> Iterator[dict[str, ServiceProcess]]:
    """Runs the neuron-executor, and a gateway that contains the other stages. Yields both by name when they are ready.

    All addresses are Unix sockets. `options`: options of the gateway.
    """
    # Not in a folder of pytest's, whose path may be too long for a socket's.
    with TemporaryDirectory(prefix="np-") as folder:
        sockets = {service: f"unix:{folder}/{service}.sock" for service in ("neuron-executor", "gateway")}
        near = ("--tokenizer-target", "local", "--postprocessor-target", "local")
        of_gateway = (*near, "--executor-target", sockets["neuron-executor"], *options)
        of_both = ("--repository", str(repository), "--listen")
        with (
            ServiceProcess("neuron-executor", *of_both, sockets["neuron-executor"], environment=UNPREPARED) as executor,
            ServiceProcess("gateway", *of_both, sockets["gateway"], *of_gateway) as gateway,
        ):
            executor.wait_until_ready()
            gateway.wait_until_ready().wait_for("all stages reached")
            yield {"neuron-executor": executor, "gateway": gateway}


def make_slow(repository: Path, folder: Path) -> Path:
    """Makes a repository in `folder` of one fake model whose every batch takes a second and a half.

    The model has one bucket, so that its start takes three batches.
    """
    copy_bundle(repository, "classifier", folder, {"device_time_s": str(DEVICE_TIME_S)})
    with changing_manifest(folder / "classifier" / "1") as content:
        content["artifacts"][0]["buckets"] = [{"batch": 32, "tokens": 32}]
    return folder
