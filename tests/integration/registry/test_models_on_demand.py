"""`--models-on-demand`: many models at one executor, of which some are in memory."""

import asyncio
import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from demo.processes import four_processes
from neuronpipe.api.v1.models_pb2 import VersionState
from neuronpipe.client import AsyncClient
from tests.callers.requests import classify
from tests.models.versions import changing_manifest
from tests.suite.waiting import happens

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_BYTES = 1000
_MODELS = 100
_FILE = "artifacts/fake/weights.bin"
_ON_DEMAND = ("--models-on-demand", "--max-model-memory-bytes", str(10 * _BYTES))
_LOADED, _UNLOADED = VersionState.VERSION_STATE_READY, VersionState.VERSION_STATE_UNLOADED


def _name(number: int) -> str:
    return f"m{number:03}"


@pytest.fixture
def many(fake_repository: Path, tmp_path: Path) -> Path:
    """A hundred classifiers of a thousand bytes."""
    for number in range(_MODELS):
        folder = tmp_path / "many" / _name(number) / "1"
        shutil.copytree(fake_repository / "classifier" / "1", folder)
        (folder / _FILE).parent.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_bytes(bytes(_BYTES))
        with changing_manifest(folder) as content:
            content["model"]["name"] = _name(number)
            content["artifacts"][0]["files"] = [_FILE]
            content["files"][_FILE] = hashlib.sha256(bytes(_BYTES)).hexdigest()
    return tmp_path / "many"


async def _states(client: AsyncClient) -> Counter[int]:
    return Counter(model.state for model in await client.list_models())


async def _asked_for_all(client: AsyncClient) -> None:
    """Every model answers, eight at a time, and as many as there is room for are in memory then."""
    assert await _states(client) == {_UNLOADED: _MODELS}
    places = asyncio.Semaphore(8)

    async def ask(number: int) -> None:
        async with places:
            response = await client.infer(classify("a", model=_name(number)), timeout_s=60)
            assert response.model == _name(number)

    await asyncio.gather(*(ask(number) for number in range(_MODELS)))

    async def are_loaded() -> bool:
        return await _states(client) == {_UNLOADED: _MODELS - 10, _LOADED: 10}

    await happens(are_loaded)  # four processes announce it a moment later


async def test_a_hundred_models_answer_behind_a_gateway(many: Path) -> None:
    with four_processes(many, stage_options={"neuron-executor": _ON_DEMAND}) as processes:
        async with AsyncClient(processes["gateway"].target) as client:
            await _asked_for_all(client)
