"""Batches are made and taken apart in the back end's thread; the event loop is free meanwhile."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, Finish, Prepare, ResultT
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.executor_model import cut, fault_of
from neuronpipe.tasks.inputs.kind import Tokens
from tests.unit.stages.neuron_executor.scheduling import LIMITS, SPEC, KnownTime, running_model, sequence


class _ThreadedBackend(FakeBackend):
    """Computes in a thread, as back ends do."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__(BackendRequest(SPEC, [], {}, cores=1, threads=0))
        self._threads = threads

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: finish(asyncio.run(self.compute(core, prepare())))
        )


async def test_the_loop_is_free_while_a_batch_is_padded_cut_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = Tokens.pad
    ran_in: dict[str, int] = {}
    steps = {name: threading.Event() for name in ("pad", "cut", "fault_of")}

    def held(name: str) -> None:
        ran_in[name] = threading.get_ident()
        assert steps[name].wait(20)  # the loop lets it go on, unless it waits for it

    def held_pad(self: Tokens, sequences: Sequence[Arrays], padded_tokens: int) -> dict[str, Array]:
        held("pad")
        return pad(self, sequences, padded_tokens)

    def held_cut(outputs: Arrays, row: int, tokens: int, specs: Sequence[object]) -> dict[str, Array]:
        held("cut")
        return cut(outputs, row, tokens, SPEC.outputs)

    def held_fault_of(arrays: Arrays) -> object:
        held("fault_of")
        return fault_of(arrays)

    monkeypatch.setattr(Tokens, "pad", held_pad)
    monkeypatch.setattr("neuronpipe.stages.neuron_executor.executor_model.cut", held_cut)
    monkeypatch.setattr("neuronpipe.stages.neuron_executor.executor_model.fault_of", held_fault_of)
    with ThreadPoolExecutor(1) as threads:
        async with running_model(_ThreadedBackend(threads), SPEC, LIMITS, KnownTime(0, 0)) as model:
            caller = asyncio.create_task(model.run([sequence(11)], Call()))
            for step in steps.values():
                await asyncio.sleep(0.01)
                step.set()
            (computed,) = await caller
    assert computed.outputs["start_logits"].tolist() == pytest.approx([np.sin(11)], abs=1e-6)
    assert set(ran_in) == set(steps)
    assert len(set(ran_in.values())) == 1
    assert threading.get_ident() not in ran_in.values()
