"""Kubernetes' HorizontalPodAutoscaler, as its documentation describes it, over simulated executors."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import simpy

from tests.bench.cluster.executors import Executor

_SYNC_S = 15.0
_TOLERANCE = 0.1
# deploy/components/hpa: up at once, to twice as many or four more in 15 s; down by a fifth in a minute, after five.
_UP_SHARE, _UP_PODS = 2.0, 4
_DOWN_SHARE, _DOWN_S, _STABLE_S = 0.8, 60.0, 300.0
# How often Prometheus looks, and over what it takes rates.
_SCRAPE_S, _RATE_SCRAPES = 10.0, 3


@dataclass(frozen=True)
class Sample:
    """What Prometheus knows, of all executors. `busy`: how many of them are, on average over the last 30 s."""

    queue_s: float
    busy: float
    in_flight: int


# The number of executors that a rule asks for.
Rule: TypeAlias = Callable[[Sample], float]


class Cluster:
    """The executors, and the autoscaler that changes their number. `pods_s`: what was paid for."""

    def __init__(
        self,
        environment: simpy.Environment,
        make: Callable[[], Executor],
        rule: Rule,
        bounds: tuple[int, int],
        start_s: float,
    ) -> None:
        """`bounds`: the least number, with which it begins, and the largest. `start_s`: from the decision to ready."""
        self.ready = [make() for _ in range(bounds[0])]
        self.pods_s = 0.0
        self.sizes: list[tuple[float, int]] = []
        self._environment = environment
        self._make = make
        self._rule = rule
        self._bounds = bounds
        self._start_s = start_s
        self._leaving: list[Executor] = []
        self._wanted = bounds[0]
        self._busy_s: deque[float] = deque(maxlen=_RATE_SCRAPES + 1)
        self._gone_busy_s = 0.0
        self._sample = Sample(0.0, 0.0, 0)
        self._advice: deque[tuple[float, int]] = deque()
        self._last_down_s = -math.inf

    def scrape(self) -> simpy.events.ProcessGenerator:
        """Keeps the sample, and the bill."""
        while True:
            executors = [*self.ready, *self._leaving]
            self._busy_s.append(self._gone_busy_s + sum(executor.busy_s for executor in executors))
            span_s = _SCRAPE_S * max(1, len(self._busy_s) - 1)
            self._sample = Sample(
                sum(executor.work_s for executor in self.ready),
                (self._busy_s[-1] - self._busy_s[0]) / span_s,
                sum(executor.waiting + executor.running for executor in self.ready),
            )
            for executor in [left for left in self._leaving if not left.running and not left.waiting]:
                self._gone_busy_s += executor.busy_s
                self._leaving.remove(executor)
            self.pods_s += _SCRAPE_S * (self._wanted + len(self._leaving))
            self.sizes.append((self._environment.now, self._wanted))
            yield self._environment.timeout(_SCRAPE_S)

    def sync(self) -> simpy.events.ProcessGenerator:
        """Decides, every 15 seconds."""
        while True:
            yield self._environment.timeout(_SYNC_S)
            wanted = self._decide(self._rule(self._sample))
            if wanted > self._wanted:
                for _ in range(wanted - self._wanted):
                    self._environment.process(self._start())
            elif wanted < self._wanted:
                for _ in range(min(self._wanted - wanted, len(self.ready) - 1)):
                    self._leaving.append(self.ready.pop())
            self._wanted = wanted

    def _decide(self, asked: float) -> int:
        now_s, least, largest = self._environment.now, *self._bounds
        current = self._wanted
        advised = current if abs(asked / current - 1) <= _TOLERANCE else math.ceil(asked)
        advised = min(largest, max(least, advised))
        self._advice.append((now_s, advised))
        while self._advice[0][0] < now_s - _STABLE_S:
            self._advice.popleft()
        if advised > current:
            return min(advised, max(math.ceil(current * _UP_SHARE), current + _UP_PODS))
        stable = max(each for _, each in self._advice)
        if stable < current and now_s >= self._last_down_s + _DOWN_S:
            self._last_down_s = now_s
            return max(stable, math.floor(current * _DOWN_SHARE))
        return current

    def _start(self) -> simpy.events.ProcessGenerator:
        yield self._environment.timeout(self._start_s)
        if len(self.ready) < self._wanted:
            self.ready.append(self._make())
