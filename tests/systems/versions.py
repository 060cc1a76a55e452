"""Callers of a classifier whose versions swap, and the registry that swaps them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.api.v1.models_pb2 import Model, VersionState
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from tests.callers.requests import classify
from tests.suite.waiting import happens

CALLERS = 8
_SIGNED = Signed("ann")


def make_stable(repository: Path, version: int) -> Registry:
    return FolderRepository(repository).change_registry(
        lambda now: now.alias("classifier", "stable", version, _SIGNED), _SIGNED
    )


@contextmanager
def one_process_of(repository: Path) -> Iterator[Mapping[str, ServiceProcess]]:
    with ServiceProcess("all", "--repository", str(repository)) as process:
        yield {"gateway": process.wait_until_ready()}


@dataclass
class Load:
    """Answers that callers got, without a version and with the alias."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def wait_for_more(self, version: str) -> None:
        """Waits until a version has answered some more."""
        enough = self.answers[version] + CALLERS
        await happens(lambda: self.answers[version] > enough)

    async def call(self, client: AsyncClient, number: int) -> None:
        """Asks as one caller, without a pause until it is cancelled."""
        count = 0
        while True:
            count += 1
            request = classify(f"caller {number}, request {count % 50}")  # few texts, or caches of tokens would grow
            request.version = ("", "stable")[count % 2]
            try:
                response = await client.infer(request, timeout_s=30)
            except NeuronpipeError as error:
                self.wrong.append(f"{error.reason}: {error.message}")
                continue
            labels = [label.label for label in response.result.text_classification.labels]
            self.answers[response.version] += 1
            if not labels or any(not label.startswith(f"{response.version}-") for label in labels):
                self.wrong.append(f"version {response.version} answered {labels}")


@asynccontextmanager
async def under_load(client: AsyncClient) -> AsyncIterator[Load]:
    load = Load()
    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(load.call(client, number)) for number in range(CALLERS)]
        try:
            yield load
        finally:
            for caller in callers:
                caller.cancel()


async def listed(client: AsyncClient) -> dict[str, Model]:
    return {model.version: model for model in await client.list_models()}


async def serves_only(client: AsyncClient, version: str) -> None:
    """Waits until a version has all requests, and no other is loaded."""

    async def is_so() -> bool:
        models = await listed(client)
        return models.keys() == {version} and models[version].state == VersionState.VERSION_STATE_READY

    await happens(is_so)


async def shows(client: AsyncClient, version: str, field: str, value: object) -> None:
    """Waits until a version is listed with a value."""

    async def is_so() -> bool:
        return bool(getattr((await listed(client)).get(version, Model()), field) == value)

    await happens(is_so)
