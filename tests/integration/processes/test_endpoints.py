"""Several processes of each stage behind one gateway: all of them work, and a caller does not notice that one of them
goes.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.client import AsyncClient
from tests.callers.requests import classify
from tests.integration.processes.test_lifecycle import OPTIONS
from tests.models.repository import link_models

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

# Texts of different lengths and words, whose labels have different scores.
_TEXTS = [" ".join(["one", "two", "three", "four", "five"][number % 5 :] * (1 + number)) for number in range(20)]
_REQUESTS = 300
# So many at a time: enough to keep every process busy, and fewer than are admitted at once.
_CALLERS = 50


@dataclass
class _Doubled:
    """Two processes of each stage and a client of their gateway, which asks once: what fails, fails."""

    stages: dict[str, list[ServiceProcess]]
    gateway: ServiceProcess
    client: AsyncClient

    async def labels(self, text: str) -> dict[str, float]:
        """What the classifier says of a text."""
        response: InferResponse = await self.client.infer(classify(text), timeout_s=60)
        return {label.label: label.score for label in response.result.text_classification.labels}

    async def undisturbed(self) -> list[dict[str, float]]:
        """What the classifier says of each text while nothing else goes on."""
        return [await self.labels(text) for text in _TEXTS]

    async def ask_with_one_frozen(self, process: ServiceProcess) -> "list[asyncio.Task[dict[str, float]]]":
        """Stops a process and asks for all texts at once; by the end it has some of them, and the other has answered
        the rest.
        """
        process.signal(signal.SIGSTOP)
        for _ in range(10):  # on a busy machine the other may answer each text before the next arrives
            asked = [asyncio.create_task(self.labels(text)) for text in _TEXTS]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(200):  # as a clock: round trips through the same gateway, ten for each text
                await self.client.list_models()
            if not all(task.done() for task in asked):
                return asked
        raise AssertionError("the process that is stopped got no work")

    async def under_load(self, at: dict[int, tuple[ServiceProcess, signal.Signals]]) -> list[dict[str, float]]:
        """What it says of the texts in turn to many callers at once, while processes get signals: before the nth
        request is sent.
        """
        numbers = iter(range(_REQUESTS))
        answers: dict[int, dict[str, float]] = {}

        async def caller() -> None:
            for number in numbers:
                if number in at:
                    process, sent = at[number]
                    process.signal(sent)
                answers[number] = await self.labels(_TEXTS[number % len(_TEXTS)])

        await asyncio.gather(*(caller() for _ in range(_CALLERS)))
        return [answers[number] for number in range(_REQUESTS)]


@pytest_asyncio.fixture
async def doubled(fake_repository: Path, tmp_path: Path) -> AsyncIterator[_Doubled]:
    repository = ("--repository", str(link_models(tmp_path / "repository", fake_repository, "classifier")))
    async with AsyncExitStack() as stack:
        stages = {
            stage: [stack.enter_context(ServiceProcess(stage, *repository)) for _ in range(2)] for stage in OPTIONS
        }
        targets = [
            f"{option}={','.join(process.wait_until_ready().target for process in stages[stage])}"
            for stage, option in OPTIONS.items()
        ]
        gateway = stack.enter_context(ServiceProcess("gateway", *repository, *targets))
        gateway.wait_until_ready().wait_for("all stages reached")
        gateway.wait_for("a stage's stream is open", times=2 * len(OPTIONS))
        client = await stack.enter_async_context(AsyncClient(gateway.target, retries=False))
        yield _Doubled(stages, gateway, client)


@pytest.mark.parametrize("stage", OPTIONS)
@pytest.mark.parametrize("frozen", [0, 1], ids=["first", "second"])
async def test_every_process_of_a_stage_has_a_part_of_the_work(doubled: _Doubled, stage: str, frozen: int) -> None:
    expected = await doubled.undisturbed()
    asked = await doubled.ask_with_one_frozen(doubled.stages[stage][frozen])
    assert any(task.done() for task in asked)  # the other's
    doubled.stages[stage][frozen].signal(signal.SIGCONT)
    assert await asyncio.gather(*asked) == expected


@pytest.mark.parametrize("stage", OPTIONS)
async def test_what_a_process_dies_with_is_answered_by_another(doubled: _Doubled, stage: str) -> None:
    expected = await doubled.undisturbed()
    asked = await doubled.ask_with_one_frozen(doubled.stages[stage][0])
    doubled.stages[stage][0].signal(signal.SIGKILL)
    assert await asyncio.gather(*asked) == expected


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM], ids=lambda sent: sent.name)
async def test_no_request_fails_while_one_of_two_processes_of_each_stage_goes(
    doubled: _Doubled, sent: signal.Signals
) -> None:
    expected = await doubled.undisturbed()
    victims = [processes[0] for processes in doubled.stages.values()]
    answers = await doubled.under_load({100: (victims[1], sent), 150: (victims[0], sent), 200: (victims[2], sent)})
    assert answers == expected * (_REQUESTS // len(_TEXTS))
    codes = [victim.wait() for victim in victims]
    assert codes == [0 if sent is signal.SIGTERM else -signal.SIGKILL] * 3
    assert "stage lost" not in [line["event"] for line in doubled.gateway.events()]


async def test_the_gateways_own_end_is_no_loss_of_its_stages(doubled: _Doubled) -> None:
    doubled.gateway.signal(signal.SIGTERM)
    assert doubled.gateway.wait() == 0
    assert [line["event"] for line in doubled.gateway.events() if line["level"] != "info"] == []
