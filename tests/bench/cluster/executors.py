"""Executors that compute batches of what waits, and the gateways' way of giving them work. Simulated by SimPy."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import simpy

# The resolution of latencies, and of arrivals.
_BIN_S = 0.001
_TICK_S = 0.02


@dataclass(frozen=True)
class Device:
    """What an executor runs on. A batch takes `overhead_s` and `token_s` for each token.

    The defaults are MiniLM in float32 on two CPUs (docs/benchmarks/README.md): 2.7 ms a batch, 0.26 ms a token; texts
    of 33 tokens, of which 6 % more are computed as padding.
    """

    cores: int = 2
    overhead_s: float = 0.0027
    token_s: float = 0.00026
    tokens: float = 33 * 1.06
    max_batch: int = 8

    def batch_s(self, requests: int) -> float:
        """The time of a batch."""
        return self.overhead_s + self.token_s * self.tokens * requests

    @property
    def requests_per_s(self) -> float:
        """What an executor answers at most."""
        return self.cores * self.max_batch / self.batch_s(self.max_batch)


class Outcomes:
    """What became of requests. `shed`: they were refused or dropped, since they would have been too late."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.shed = 0
        self._latencies = np.zeros(math.ceil(deadline_s * 2 / _BIN_S), np.int64)

    def answer(self, latency_s: float, requests: int) -> None:
        """Counts answers."""
        self._latencies[min(int(latency_s / _BIN_S), len(self._latencies) - 1)] += requests

    @property
    def answered(self) -> int:
        """The number of answers."""
        return int(self._latencies.sum())

    def percentile_s(self, share: float) -> float:
        """The latency that a share of the answers does not exceed, in the executors."""
        return float((np.searchsorted(np.cumsum(self._latencies), share * self.answered) + 1) * _BIN_S)


class Executor:
    """A process with a queue of its own."""

    def __init__(self, environment: simpy.Environment, device: Device, outcomes: Outcomes) -> None:
        self.waiting = 0
        self.running = 0
        self.busy_s = 0.0
        self._environment = environment
        self._device = device
        self._outcomes = outcomes
        self._idle = device.cores
        self._queue: deque[tuple[float, int]] = deque()

    @property
    def work_s(self) -> float:
        """neuronpipe.queue.work: for how long what waits keeps all cores busy."""
        return self.waiting * self._device.tokens * self._device.token_s / self._device.cores

    def offer(self, requests: int) -> None:
        """Takes requests, or refuses them where the queue is too long for their deadline."""
        if self.work_s > self._outcomes.deadline_s:
            self._outcomes.shed += requests
            return
        self._queue.append((self._environment.now, requests))
        self.waiting += requests
        self._start()

    def _start(self) -> None:
        while self._idle and (batch := self._take(math.ceil(self.waiting / self._idle))):
            size = sum(requests for _, requests in batch)
            seconds = self._device.batch_s(size)
            self._idle -= 1
            self.running += size
            end = self._environment.timeout(seconds)
            end.callbacks.append(partial(self._end, batch, size, seconds))

    def _take(self, wanted: int) -> list[tuple[float, int]]:
        """The next batch; what would be too late is dropped."""
        batch, room = [], min(wanted, self._device.max_batch)
        latest_s = self._environment.now + self._device.batch_s(1) - self._outcomes.deadline_s
        while self._queue and room:
            arrived_s, requests = self._queue.popleft()
            taken = requests if arrived_s < latest_s else min(requests, room)
            self.waiting -= taken
            if arrived_s < latest_s:
                self._outcomes.shed += requests
                continue
            if taken < requests:
                self._queue.appendleft((arrived_s, requests - taken))
            batch.append((arrived_s, taken))
            room -= taken
        return batch

    def _end(self, batch: list[tuple[float, int]], size: int, seconds: float, event: simpy.Event) -> None:
        self._idle += 1
        self.running -= size
        self.busy_s += seconds / self._device.cores
        for arrived_s, requests in batch:
            self._outcomes.answer(self._environment.now - arrived_s, requests)
        self._start()


def arrive(
    environment: simpy.Environment,
    rate_at: Callable[[float], float],
    executors: Callable[[], list[Executor]],
    until_s: float,
    random: np.random.Generator,
) -> simpy.events.ProcessGenerator:
    """Poisson arrivals, given to executors at random: a gateway gives an item to a stream that takes it at once, and
    does not know how much waits behind it.
    """
    while environment.now < until_s:
        requests = int(random.poisson(rate_at(environment.now) * _TICK_S))
        ready = executors()
        chosen = np.bincount(random.integers(len(ready), size=requests), minlength=len(ready))
        for index in np.flatnonzero(chosen):
            ready[index].offer(int(chosen[index]))
        yield environment.timeout(_TICK_S)
