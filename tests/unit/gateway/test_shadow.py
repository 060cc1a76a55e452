"""gateway/shadow.py: copies are compared, change no answer, and are dropped before anything else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import LabelScore, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Stages, TokenizeItem
from neuronpipe.core.model import ModelRoute
from neuronpipe.core.names import Metrics
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.shadow import MAX_COPIES
from tests.servers.door import Door, models_of
from tests.suite.waiting import happens
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded
from tests.unit.task_messages import task_input, task_result

_ALL = ModelRoute({}, ((1, 1.0),), (2, 1.0))


class _System:
    """A gateway with versions 1 and 2, whose stages answer with the label of the version."""

    def __init__(self, route: ModelRoute = _ALL, labels: tuple[str, ...] = ("a", "b", "c"), **limits: Any) -> None:
        self.telemetry = Recorded()
        self.executed: list[ExecuteItem] = []
        self.labels = {1: "a", 2: "a"}
        self.may_end = {1: asyncio.Event(), 2: asyncio.Event()}
        for event in self.may_end.values():
            event.set()
        self.fault: Exception | None = None
        models = models_of([model_spec(version=version, labels=labels) for version in (1, 2)], self.telemetry)
        models.route({"small": route})
        stages = Stages(self._tokenize, self._execute, self._postprocess)
        self.pipeline = Pipeline(models, stages, PipelineSettings(**limits), self.telemetry)
        self.door = Door(NativeDoor(self.pipeline, Catalog(models), PipelineSettings(**limits)))

    async def _tokenize(self, item: TokenizeItem) -> EncodedInput:
        return EncodedInput(TensorSets(data=[b""]), tokens=5)

    async def _execute(self, item: ExecuteItem) -> Prediction:
        self.executed.append(item)
        await self.may_end[item.model.version].wait()
        if self.fault and item.model.version == 2:
            raise self.fault
        return Prediction(NO_TENSORS)

    async def _postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        label = LabelScore(label=self.labels[item.model.version])
        return pack_result(task_result(text_classification={"labels": [label]}))

    async def ask(self, number: int = 0, **changes: Any) -> str:
        """The version that answers."""
        described: dict[str, Any] = {
            "model": "small",
            "request_id": f"request {number}",
            "input": task_input(text_classification={"text": "hello"}),
        }
        return (await self.door.infer(InferRequest(**described | changes), Call())).version

    @property
    def outcomes(self) -> dict[str, float]:
        return {labels[2]: count for labels, count in self.telemetry.counts(Metrics.SHADOW_COPIES).items()}


@asynccontextmanager
async def _running(system: _System) -> AsyncIterator[_System]:
    async with system.pipeline.copies.running():
        yield system


async def test_a_copy_is_compared_and_the_answer_is_the_stable_versions() -> None:
    async with _running(_System()) as system:
        assert [await system.ask(number) for number in range(2)] == ["1", "1"]
        await happens(lambda: system.outcomes == {"compared": 2})
        system.labels[2] = "b"
        assert await system.ask() == "1"
        await happens(lambda: system.outcomes == {"compared": 3})
    agreement = system.telemetry.meters.histogram(Metrics.SHADOW_AGREEMENT, "small", "2")
    assert (agreement.total, sum(agreement.counts)) == (2.0, 3)
    durations = system.telemetry.counts(Metrics.VERSION_DURATION)
    assert durations == {("small", "1", "answer"): 3, ("small", "2", "copy"): 3}
    # Copies are in no other metric of requests, and in no trace.
    assert system.telemetry.counts(Metrics.REQUEST_DURATION) == {("small", "1", "OK"): 3}
    assert len(system.telemetry.spans) == 3 * 4  # a request and its three stages


async def test_an_answer_does_not_wait_for_its_copy_which_is_the_last_work_of_all() -> None:
    async with _running(_System()) as system:
        system.may_end[2].clear()
        assert await asyncio.wait_for(system.ask(), 5) == "1"
        await happens(lambda: len(system.executed) == 2)
        call, work = system.executed[-1].call, system.executed[-1].work
        assert (call.priority, work.is_beyond_share) == (Priority.PRIORITY_BULK, True)
        assert call.deadline_s is not None
        assert call.deadline_s <= time.monotonic() + 1.0
        assert work.trace is not None
        assert not work.trace.is_sampled


async def test_requests_for_a_version_and_those_beyond_the_share_are_not_copied() -> None:
    half = ModelRoute({"canary": 2}, ((1, 1.0),), (2, 0.5))
    async with _running(_System(half)) as system:
        assert await system.ask(version="canary") == "2"
        assert await system.ask(version="1") == "1"
        for number in range(100):
            await system.ask(number)
            await asyncio.sleep(0.002)  # for a copy to begin
        await happens(lambda: system.outcomes.get("compared", 0) >= 30)
        await asyncio.sleep(0.05)  # nothing more happens
        assert 30 <= system.outcomes["compared"] <= 70  # 50 is meant; 4 standard deviations are 20


async def test_an_answer_of_the_shadow_itself_is_not_copied() -> None:
    async with _running(_System(ModelRoute({}, ((2, 1.0),), (2, 1.0)))) as system:
        assert await system.ask() == "2"
        await asyncio.sleep(0.05)  # nothing happens
        assert (len(system.executed), system.outcomes) == (1, {})


async def test_copies_beyond_the_limit_are_dropped() -> None:
    async with _running(_System()) as system:
        system.may_end[2].clear()
        for number in range(3 * MAX_COPIES):
            await system.ask(number)
            await asyncio.sleep(0)
        # As many are under way, and as many wait.
        assert system.outcomes == {"dropped": MAX_COPIES}
        system.may_end[2].set()
        await happens(lambda: system.outcomes == {"dropped": MAX_COPIES, "compared": 2 * MAX_COPIES})


async def test_copies_are_dropped_while_the_gateway_is_half_full() -> None:
    async with _running(_System(max_requests_in_flight=4)) as system:
        system.may_end[1].clear()
        waiting = [asyncio.create_task(system.ask(number)) for number in range(3)]
        await happens(lambda: len(system.executed) == 3)
        system.may_end[1].set()
        await asyncio.gather(*waiting)
        assert system.outcomes["dropped"] >= 1


@pytest.mark.parametrize(
    ("fault", "outcome"), [(RuntimeError("broken"), "failed"), (InternalError("broken"), "failed")]
)
async def test_a_copy_that_fails_is_counted_and_hurts_nobody(fault: Exception, outcome: str) -> None:
    async with _running(_System()) as system:
        system.fault = fault
        assert await system.ask() == "1"
        await happens(lambda: system.outcomes == {outcome: 1})
        assert await system.ask() == "1"


async def test_a_copy_that_takes_far_longer_than_the_answer_is_late() -> None:
    async with _running(_System()) as system:
        system.may_end[2].clear()
        await system.ask()
        await happens(lambda: system.outcomes == {"late": 1})


async def test_a_classifier_with_one_label_is_incomparable() -> None:
    async with _running(_System(labels=("a",))) as system:
        await system.ask()
        await happens(lambda: system.outcomes == {"incomparable": 1})
