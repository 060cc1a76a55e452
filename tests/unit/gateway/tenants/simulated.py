"""Tenants' requests through the real control to a simulated model, in simulated time."""

import asyncio
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.gateway.admission import AdmissionControl
from neuronpipe.gateway.tenants.tenants import Rights, Tenants
from tests.suite.waiting import cancelled
from tests.unit.stages.neuron_executor.jumping_time import JumpingLoop

_MODEL = ModelKey("m", 1)
_TOKENS = 10
_LIMITS = (1024, 1 << 20)


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()


@dataclass(frozen=True)
class Device:
    """Takes the oldest requests as a batch, which takes `batch_s(requests)`. As in the executor's queue, those within
    their tenant's share go first.
    """

    batch_s: Callable[[int], float]
    max_batch: int

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return max(size / self.batch_s(size) for size in range(1, self.max_batch + 1))


@dataclass
class Outcome:
    """Of one tenant: latencies of its answered requests in seconds, and how many were refused."""

    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.latencies_s, n=100)[percent - 1]


class Simulation:
    """One model behind a control."""

    def __init__(self, loop: JumpingLoop, device: Device, window_s: float | None) -> None:
        """`window_s`: None for a control that knows no tenants."""
        self._loop = loop
        self._device = device
        tenants = None if window_s is None else Tenants(lambda name: Rights(), _LIMITS, window_s, Meters(), loop.time)
        self._control = AdmissionControl(*_LIMITS, tenants)
        # Those within their tenant's share, and the others.
        self._queues: tuple[list[asyncio.Future[None]], list[asyncio.Future[None]]] = [], []
        self._has_work = asyncio.Event()

    async def run(self, rates: dict[str, float], seconds: float) -> dict[str, Outcome]:
        """Each tenant's requests at the times of a Poisson process, for so long."""
        outcomes = {tenant: Outcome() for tenant in rates}
        tasks = [
            asyncio.create_task(self._send(tenant, rate, random.Random(seed), outcomes[tenant]))
            for seed, (tenant, rate) in enumerate(rates.items())
        ]
        tasks.append(asyncio.create_task(self._compute()))
        await asyncio.sleep(seconds)
        told = {tenant: Outcome(list(outcome.latencies_s), outcome.refused) for tenant, outcome in outcomes.items()}
        await cancelled(*tasks)
        return told

    async def _send(self, tenant: str, rate: float, random_: random.Random, outcome: Outcome) -> None:
        call = Call(caller=Caller(tenant, tenant))
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(random_.expovariate(rate))
                group.create_task(self._ask(call, outcome))

    async def _ask(self, call: Call, outcome: Outcome) -> None:
        began_s = self._loop.time()
        try:
            self._control.check_room(None, call.caller.tenant)
            task = asyncio.current_task()
            assert task
            with self._control.admit(call, 0, _TOKENS, model="m", shed=partial(_cancel, task)) as admission:
                async with admission.turn(_MODEL) as turn:
                    computed: asyncio.Future[None] = self._loop.create_future()
                    self._queues[bool(turn and turn.is_beyond_share)].append(computed)
                    self._has_work.set()
                    await computed
        except (Overloaded, asyncio.CancelledError):
            outcome.refused += 1
        else:
            outcome.latencies_s.append(self._loop.time() - began_s)

    async def _compute(self) -> None:
        while True:
            await self._has_work.wait()
            waiting = [request for queue in self._queues for request in queue if not request.done()]
            batch = waiting[: self._device.max_batch]
            for queue in self._queues:
                queue[:] = [request for request in queue if not request.done() and request not in batch]
            if not batch:
                self._has_work.clear()
                continue
            await asyncio.sleep(self._device.batch_s(len(batch)))
            for request in batch:
                if not request.done():
                    request.set_result(None)


def simulate(
    monkeypatch: pytest.MonkeyPatch, device: Device, rates: dict[str, float], seconds: float, window_s: float | None
) -> dict[str, Outcome]:
    """The outcomes of tenants that send so many requests a second."""
    loop = JumpingLoop()
    for module in ("admission", "loads"):
        monkeypatch.setattr(f"neuronpipe.gateway.{module}.time", loop)

    async def run() -> dict[str, Outcome]:
        return await Simulation(loop, device, window_s).run(rates, seconds)

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()
