"""Loads, rules, and what came of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import simpy

from tests.bench.cluster.autoscaler import Cluster, Rule
from tests.bench.cluster.executors import Device, Executor, Outcomes, arrive

DEVICE = Device()
_DEADLINE_S = 1.0
_BUSY, _QUEUE_S = 0.7, 0.2

RULES: Mapping[str, Rule] = {
    "CPU 70 %": lambda sample: sample.busy / _BUSY,
    "queue 0.2 s": lambda sample: sample.queue_s / _QUEUE_S,
    "8 requests in flight": lambda sample: sample.in_flight / 8,
    "queue 0.2 s or busy 70 %": lambda sample: max(sample.queue_s / _QUEUE_S, sample.busy / _BUSY),
}
FIXED = "fixed, for the peak"


@dataclass(frozen=True)
class Scenario:
    """A load. `rate_at`: requests a second at a time. `bounds`: of the number of executors."""

    name: str
    text: str
    seconds: float
    rate_at: Callable[[float], float]
    bounds: tuple[int, int]
    start_s: float

    @property
    def peak(self) -> float:
        """The highest rate."""
        return max(map(self.rate_at, np.arange(0, self.seconds, 1.0)))


@dataclass(frozen=True)
class Run:
    """What came of a scenario with a rule. `pods`: their number on average."""

    p50_s: float
    p99_s: float
    shed_share: float
    pods: float
    sizes: Sequence[tuple[float, int]]


def _day(now_s: float) -> float:
    """From 200 to 1,000 requests a second and back, in an hour."""
    return 600 - 400 * math.cos(2 * math.pi * now_s / 3600)


def _bursts(now_s: float) -> float:
    """A minute of 900 requests a second in every five of 300."""
    return 900 if now_s % 300 >= 240 else 300


def _flash_crowd(low: float, high: float, begin_s: float, rise_s: float) -> Callable[[float], float]:
    def rate(now_s: float) -> float:
        return low + (high - low) * min(1.0, max(0.0, (now_s - begin_s) / rise_s))

    return rate


SCENARIOS = (
    Scenario("a day", "200 to 1,000/s and back, a day in an hour", 3600, _day, (2, 40), 10),
    Scenario("bursts", "300/s, and 900/s in one minute of five", 1500, _bursts, (2, 40), 10),
    Scenario("flash crowd", "200/s, and 1,500/s within 20 s", 900, _flash_crowd(200, 1500, 300, 20), (2, 40), 10),
    Scenario(
        "flash crowd, new nodes",
        "the same; a pod takes 90 s to start",
        900,
        _flash_crowd(200, 1500, 300, 20),
        (2, 40),
        90,
    ),
)
LARGE = Scenario(
    "a large flash crowd", "20,000/s, and 100,000/s within 30 s", 120, _flash_crowd(2e4, 1e5, 15, 30), (140, 1000), 10
)


def run(scenario: Scenario, rule: str, device: Device = DEVICE, seed: int = 1) -> Run:
    """Simulates a scenario."""
    environment, outcomes = simpy.Environment(), Outcomes(_DEADLINE_S)
    bounds, decide = scenario.bounds, RULES.get(rule)
    if decide is None:
        needed = math.ceil(scenario.peak / (_BUSY * device.requests_per_s)) if bounds[0] < bounds[1] else bounds[0]
        bounds, decide = (needed, needed), lambda sample: float(needed)
    cluster = Cluster(environment, lambda: Executor(environment, device, outcomes), decide, bounds, scenario.start_s)
    random = np.random.default_rng(seed)
    environment.process(arrive(environment, scenario.rate_at, lambda: cluster.ready, scenario.seconds, random))
    environment.process(cluster.scrape())
    environment.process(cluster.sync())
    environment.run(until=scenario.seconds + 2 * _DEADLINE_S)
    offered = outcomes.answered + outcomes.shed
    return Run(
        outcomes.percentile_s(0.5),
        outcomes.percentile_s(0.99),
        outcomes.shed / offered,
        cluster.pods_s / scenario.seconds,
        cluster.sizes,
    )
