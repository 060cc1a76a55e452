"""Under more load than can be borne, the scheduler still answers as much as the device can do: simulated, in time that
jumps.
"""

import asyncio
import random

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.jumping_time import JumpingLoop
from tests.unit.stages.neuron_executor.scheduling import running_model, tell_time

_SEED = 20261121
_SPEC = model_spec(max_tokens=64)
_LIMITS = Limits(max_batch_size=32, max_batch_tokens=8192, max_queue_sequences=4096)
_TOKENS = 15  # FakeBackend makes them 16
_LOAD_S = 5.0


class _TimedBackend(FakeBackend):
    """Takes an overhead a batch and a time a padded token, a tenth more or less."""

    def __init__(self, overhead_s: float, token_s: float, generator: random.Random) -> None:
        super().__init__(BackendRequest(_SPEC, [], {}, cores=1, threads=0))
        self._overhead_s, self._token_s, self._generator = overhead_s, token_s, generator
        self.computed = 0

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        self.computed += len(inputs["input_ids"])
        await asyncio.sleep(
            (self._overhead_s + self._token_s * inputs["input_ids"].size) * self._generator.uniform(0.9, 1.1)
        )
        return await super().compute(core, inputs)


async def _answered(scheduler: ExecutorModel, rate: float, timeout_s: float, generator: random.Random) -> int:
    """Sends requests at random times and returns how many were answered in time."""

    async def one() -> bool:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await scheduler.run(
                    [{"input_ids": np.ones(_TOKENS, np.int32)}], Call(deadline_s=loop.time() + timeout_s)
                )
        except (TimeoutError, DeadlineExceeded, Overloaded):
            return False
        return True

    callers = []
    for _ in range(int(rate * _LOAD_S)):
        await asyncio.sleep(generator.expovariate(rate))
        callers.append(asyncio.create_task(one()))
    return sum(await asyncio.gather(*callers))


@pytest.mark.parametrize("overload", [1, 2, 4])
@pytest.mark.parametrize(
    ("overhead_s", "token_s", "timeout_s"),
    [(0.0027, 0.00026, 0.5), (0.02, 0.00005, 0.5), (0.02, 0.00005, 0.1)],
    ids=["a small model on a CPU", "a device with a large overhead", "the same with short deadlines"],
)
def test_as_much_is_answered_as_the_device_can_do_and_nearly_all_that_is_computed(
    monkeypatch: pytest.MonkeyPatch, overhead_s: float, token_s: float, timeout_s: float, overload: float
) -> None:
    generator = random.Random(_SEED)
    loop = JumpingLoop()
    tell_time(monkeypatch, loop)
    # Full batches, of 32 sequences of 16 tokens.
    capacity = 32 / (overhead_s + token_s * 32 * 16)
    batch_time = BatchTime()
    for tokens in (4, 64):
        batch_time.anchor(tokens, overhead_s + token_s * tokens)

    async def simulate() -> tuple[int, int]:
        backend = _TimedBackend(overhead_s, token_s, generator)
        async with running_model(backend, _SPEC, _LIMITS, batch_time) as scheduler:
            return await _answered(scheduler, capacity * overload, timeout_s, generator), backend.computed

    try:
        answered, computed = loop.run_until_complete(simulate())
    finally:
        loop.close()
    assert answered >= 0.9 * computed, f"seed {_SEED}"
    # Batches need not be full before they are efficient, and some of the time goes by before it is clear who is late.
    assert answered >= 0.8 * capacity * _LOAD_S, f"seed {_SEED}"
