"""A swap of versions in containers: compile and approve, canary, stable, roll back."""

import asyncio

from neuronpipe.api.v1.models_pb2 import VersionState
from neuronpipe.client import AsyncClient
from tests.callers.requests import classify
from tests.e2e.load import load
from tests.e2e.stack import Stack

_SWAP_LIMIT_S = 120


async def _shared_out(client: AsyncClient, shares: dict[str, float]) -> None:
    """Waits until the versions of the classifier are ready and have these shares, and no other version is loaded."""
    async with asyncio.timeout(_SWAP_LIMIT_S):
        while True:
            found = [model for model in await client.list_models() if model.name == "classifier"]
            if {model.version: model.share for model in found} == shares and {model.state for model in found} == {
                VersionState.VERSION_STATE_READY
            }:
                return
            await asyncio.sleep(0.05)


async def test_nobody_notices_that_a_version_is_swapped_and_swapped_back(stack: Stack) -> None:
    def run(*words: str) -> str:
        return stack.compose("run", "--rm", "--no-deps", "-T", "compile", *words, "--repository", "/repository")

    async with AsyncClient(stack.target) as client, load(stack.target) as going:
        task = ("--task", "text-classification", "--name", "classifier")
        made = await asyncio.to_thread(run, "compile", "/sources/classifier", *task, "--approve")
        assert "/repository/classifier/2" in made
        await asyncio.to_thread(run, "registry", "alias", "classifier", "canary", "2")
        await asyncio.to_thread(run, "registry", "route", "classifier", "stable=50", "canary=50")
        await _shared_out(client, {"1": 0.5, "2": 0.5})
        await going.answers(100)
        await asyncio.to_thread(run, "registry", "alias", "classifier", "stable", "2")
        await _shared_out(client, {"2": 1.0})
        assert (await client.infer(classify("A fine day."), timeout_s=30)).version == "2"
        await going.answers(100)
        # The others find the stack as it was.
        await asyncio.to_thread(run, "registry", "rollback", "classifier", "--to", "1")
        await _shared_out(client, {"1": 1.0})
        assert (await client.infer(classify("A fine day."), timeout_s=30)).version == "1"
        await going.answers(100)
    assert (going.wrong, going.failures) == ([], [])
