"""measure/promotion.py: a version is moved up as long as its guards hold, and back when one fails."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bundles.registry import Operation, Registry, Routing, Signed
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.measure.promotion import (
    INSTRUMENTS,
    GatewayNumbers,
    GuardFailed,
    Promotion,
    PromotionGuard,
    PromotionPlan,
    VersionFigures,
    added,
    describe,
    figures_of,
)
from neuronpipe.platform.telemetry.prometheus import read_page, scrape, write_page
from tests.unit.bundles.written import write_bundle

_SIGNED = Signed("ann")
_GUARDS = ("p99=1.2", "p99=300ms", "errors=1%", "agreement=0.99")


@dataclass
class Gateway:
    """Real metrics of a gateway, which answers a thousand requests between two looks."""

    route: Callable[[], Routing]
    durations_s: dict[int, float] = field(default_factory=lambda: {1: 0.01, 2: 0.01})
    failing: float = 0.0
    agreement: float = 1.0
    meters: Meters = field(default_factory=Meters)
    requests: int = 1000

    def look(self) -> GatewayNumbers:
        page, _ = write_page(self.meters, "text/plain")
        numbers = read_page(page.decode(), INSTRUMENTS)
        share = self.route().route.get("canary", 0.0) / 100
        for version, count in ((1, round(self.requests * (1 - share))), (2, round(self.requests * share))):
            self.answer(version, count)
        if self.route().shadow:
            for _ in range(self.requests // 10):
                self.meters.histogram(Metrics.SHADOW_AGREEMENT, "m", "2").record(self.agreement)
        return numbers

    def answer(self, version: int, count: int) -> None:
        failed = round(count * self.failing) if version == 2 else 0
        for status, times in (("OK", count - failed), ("INTERNAL", failed), ("INVALID_ARGUMENT", count)):
            for _ in range(times):
                self.meters.histogram(Metrics.REQUEST_DURATION, "m", str(version), status).record(1)
        for _ in range(count - failed):
            duration_ns = self.durations_s[version] * 1e9
            self.meters.histogram(Metrics.VERSION_DURATION, "m", str(version), "answer").record(duration_ns)


class System:
    """A registry with a canary, and gateways."""

    def __init__(self, folder: Path, gateways: int = 1) -> None:
        self.registry = Registry()
        for version in (1, 2):
            self.registry = self.registry.approve(read_bundle(write_bundle(folder, "m", version)), _SIGNED)
        self.registry = self.registry.alias("m", "canary", 2, _SIGNED)
        self.before = self.routing
        self.gateways = [Gateway(lambda: self.routing) for _ in range(gateways)]
        self.said: list[str] = []
        self.now_s = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    @property
    def routing(self) -> Routing:
        return self.registry.models["m"].routing

    def change(self, operation: Operation, signed: Signed) -> Registry:
        self.registry = operation(self.registry)
        return self.registry

    def read(self) -> Sequence[GatewayNumbers]:
        return [gateway.look() for gateway in self.gateways]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s in self.at:
            self.at[self.now_s]()

    def promote(self, *guards: str, **changes: Any) -> None:
        described: dict[str, Any] = {
            "model": "m",
            "target": "canary",
            "guards": [PromotionGuard.parse(text) for text in guards or _GUARDS],
            "steps": [5, 25, 50, 100],
            "step_s": 60,
            "least": 100,
            "look_s": 10,
        }
        plan = PromotionPlan(**described | changes)
        run = Promotion(
            plan, self.change, self.read, self.said.append, _SIGNED, sleep=self.sleep, clock=lambda: self.now_s
        )
        run.run(self.registry)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_a_good_version_arrives_step_by_step(system: System) -> None:
    system.promote()
    assert system.routing == Routing(aliases={"stable": 2, "canary": 2})
    actions = [change.action.partition(": ")[2].partition(":")[0] for change in system.registry.history[-4:]]
    assert actions == ["5 %", "25 %", "50 %", "version 2 is stable, it was 1"]
    expected = [{"stable": 95, "canary": 5}, {"stable": 75, "canary": 25}, {"stable": 50, "canary": 50}]
    assert [change.route for change in system.registry.history[-4:-1]] == expected
    assert system.now_s == 3 * 60
    assert "errors 0.00% and 0.00%, agreement 1.0000 of" in system.registry.history[-1].action


def test_the_last_step_may_be_less_than_all(system: System) -> None:
    system.promote("errors=1%", steps=[10, 20])
    assert system.routing == Routing(aliases={"stable": 1, "canary": 2}, route={"stable": 80, "canary": 20})


@pytest.mark.parametrize(
    ("made_worse", "told"),
    [
        ({"durations_s": {1: 0.01, 2: 0.013}}, "p99 is 1.3"),
        ({"durations_s": {1: 0.4, 2: 0.4}}, "p99 is 0.4.* s, the guard is 0.3 s"),
        ({"failing": 0.05}, "of the requests fail, the guard is 1.00%"),
        ({"agreement": 0.95}, "agreement is 0.9500, the guard is 0.99"),
    ],
)
def test_a_version_that_became_worse_is_moved_back(system: System, made_worse: dict[str, Any], told: str) -> None:
    for name, value in made_worse.items():
        setattr(system.gateways[0], name, value)
    with pytest.raises(GuardFailed, match=told):
        system.promote()
    assert system.routing == system.before
    assert re.search(told, system.registry.history[-1].action)
    assert system.registry.history[-1].action.startswith("promote canary: moved back: ")


def test_a_version_that_becomes_worse_later_is_moved_back_from_there(system: System) -> None:
    system.at[130.0] = lambda: setattr(system.gateways[0], "failing", 0.5)
    with pytest.raises(GuardFailed):
        system.promote()
    assert [change.route.get("canary") for change in system.registry.history[-4:]] == [5, 25, 50, None]


def test_too_few_requests_are_waited_for(system: System) -> None:
    system.gateways[0].requests = 20  # the canary gets one at each look
    system.promote("errors=1%", steps=[5, 100])
    assert system.now_s == pytest.approx(100 * 10, abs=10)
    assert "  waits: 114 and 6 requests of 100" in system.said


def test_what_the_canary_did_at_one_of_several_gateways_counts(tmp_path: Path) -> None:
    system = System(tmp_path, gateways=3)
    system.gateways[1].failing = 1.0
    with pytest.raises(GuardFailed, match=r"33\.33% of the requests fail"):
        system.promote("errors=1%")


def test_a_gateway_that_started_anew_counts_from_zero(system: System) -> None:
    system.at[20.0] = lambda: setattr(system.gateways[0], "meters", Meters())
    system.promote("errors=1%", steps=[50, 100])
    assert system.routing.aliases["stable"] == 2


def test_metrics_that_cannot_be_read_for_long_move_it_back(system: System) -> None:
    broken = threading.Event()
    read = system.read

    def fail() -> Sequence[GatewayNumbers]:
        if broken.is_set():
            raise SetupError("the gateway does not answer")
        return read()

    system.read = fail  # type: ignore[method-assign]
    system.at = {20.0: broken.set, 40.0: broken.clear}  # two looks fail
    system.promote("errors=1%", steps=[50, 100])
    system.registry = system.registry.set_routing("m", system.before, "as before", _SIGNED)
    system.now_s, system.at = 0.0, {20.0: broken.set}
    with pytest.raises(SetupError, match="does not answer"):
        system.promote("errors=1%", steps=[50, 100])
    assert system.routing == system.before


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_moves_it_back(system: System, interrupt: type[BaseException]) -> None:
    def stop() -> None:
        raise interrupt

    system.at[70.0] = stop
    with pytest.raises(interrupt):
        system.promote()
    assert system.routing == system.before
    assert system.registry.history[-1].action == "promote canary: moved back: interrupted"


def test_an_interrupt_while_a_step_is_written_moves_it_back(system: System) -> None:
    change = system.change

    def interrupted(operation: Operation, signed: Signed) -> Registry:
        changed = change(operation, signed)
        if changed.history[-1].route:
            raise KeyboardInterrupt
        return changed

    system.change = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        system.promote()
    assert system.routing == system.before


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_a_failed_version_is_moved_back_does_not_stop_that(
    system: System, interrupt: type[BaseException]
) -> None:
    change, interrupts = system.change, [interrupt]

    def interrupted(operation: Operation, signed: Signed) -> Registry:
        if system.routing.route.get("canary") and interrupts:
            raise interrupts.pop()
        return change(operation, signed)

    system.change = interrupted  # type: ignore[method-assign]
    system.gateways[0].failing = 0.5
    with pytest.raises(interrupt):
        system.promote()
    assert system.routing == system.before
    assert "of the requests fail" in system.registry.history[-1].action


def test_what_somebody_else_changed_is_left(system: System) -> None:
    def reroute() -> None:
        system.registry = system.registry.reroute("m", {"stable": 1, "canary": 2}, _SIGNED)

    system.at[20.0] = reroute
    with pytest.raises(SetupError, match="another author changed its routing; it is left so"):
        system.promote("errors=1%")
    assert system.routing.route == {"stable": 1, "canary": 2}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target": "fresh"}, "'fresh' is neither a version nor one of its aliases"),
        ({"target": "1"}, "1 is version 1, which is stable already"),
        ({"model": "n"}, "model 'n' is not registered; registered are: m"),
        ({"steps": [50, 20]}, "--steps: must be percentages that rise"),
        ({"steps": [0, 20]}, "--steps: must be percentages that rise"),
        ({"steps": [200]}, "--steps: must be percentages that rise"),
    ],
)
def test_what_cannot_be_promoted_is_refused_before_changes(system: System, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SetupError, match=told):
        system.promote(**changes)
    assert system.routing == system.before


@pytest.mark.parametrize(
    "text",
    ["p50=1", "p99", "p99=x", "p99=0.5", "errors=200%", "agreement=2", "errors=nan", "errors=3s", "p99=0ms", "p99_s=3"],
)
def test_a_guard_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=f"--guard '?{text}"):
        PromotionGuard.parse(text)


def test_a_quantile_lies_within_its_bucket_of_ten_percent() -> None:
    meters = Meters()
    for number in range(1, 1001):
        meters.histogram(Metrics.VERSION_DURATION, "m", "1", "answer").record(number * 1e6)
    page, _ = write_page(meters, "text/plain")
    numbers = read_page(page.decode(), INSTRUMENTS)
    figures = figures_of(added({}, [{}], [numbers]), "m", 1)
    assert figures.answers == 1000
    assert figures.p99_s == pytest.approx(0.99, rel=0.05)


def test_few_bad_requests_are_no_failure_and_many_are_one_at_once() -> None:
    guard = PromotionGuard.parse("errors=1%")
    assert guard.problem(VersionFigures(), VersionFigures(requests=3, errors=1), 100, is_over=False) == ""
    assert guard.problem(VersionFigures(), VersionFigures(requests=3, errors=3), 100, is_over=False) != ""
    # The other one's errors are not the canary's fault.
    stable = VersionFigures(requests=1000, errors=100)
    assert guard.problem(stable, VersionFigures(requests=1000, errors=105), 100, is_over=True) == ""
    assert describe([guard], stable, stable) == "1000 and 1000 requests, errors 10.00% and 10.00%"


@pytest.mark.parametrize("url", ["ftp://a/metrics", "127.0.0.1:9464", "http://127.0.0.1:1/metrics"])
def test_a_page_that_cannot_be_read_is_an_error_that_names_it(url: str) -> None:
    with pytest.raises(SetupError, match=url):
        scrape(url, INSTRUMENTS)
