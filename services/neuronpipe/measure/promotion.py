"""Gives a version of a model more requests in steps, up to all requests. Takes them back if a guard fails.

Guards compare the figures of the version with the figures of the previous version, by the metrics of all gateways.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

from neuronpipe.bundles.registry import STABLE, Operation, Registry, Routing, Shadow, Signed
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.names import Metrics

# The numbers of a gateway, by the metric's name, the suffix of its series, the values of its labels, and for the suffix
# _bucket the upper bound. Durations are in seconds.
GatewayNumbers: TypeAlias = Mapping[tuple[str, ...], float]

INSTRUMENTS = (Metrics.REQUEST_DURATION, Metrics.VERSION_DURATION, Metrics.SHADOW_AGREEMENT, Metrics.SHADOW_COPIES)

# Errors for which a version may be responsible. Others are the caller's, or due to the gateway's load.
_FAULTS = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS")


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """The figures of a version.

    - `errors`: the `requests` that failed by a fault of the server or by their deadline.
    - `p99_s`: the 99th percentile of computed answers; None without answers.
    - `copies`: the copies that were compared, or failed.
    - `agreement`: the sum over the copies, at most `copies`.
    """

    requests: float = 0.0
    errors: float = 0.0
    answers: float = 0.0
    p99_s: float | None = None
    copies: float = 0.0
    agreement: float = 0.0

    @property
    def error_share(self) -> float:
        """Errors relative to requests."""
        return self.errors / self.requests if self.requests else 0.0

    @property
    def mean_agreement(self) -> float:
        """The mean over copies; 1 without any."""
        return self.agreement / self.copies if self.copies else 1.0


def added(total: GatewayNumbers, before: Sequence[GatewayNumbers], now: Sequence[GatewayNumbers]) -> GatewayNumbers:
    """Returns a total with the increases at all gateways. Each gateway has the same place in both lists."""
    total = dict(total)
    for earlier, present in zip(before, now, strict=True):
        # A restarted gateway counts from zero: all its present numbers are increases.
        is_new = any(present.get(key, 0.0) < value for key, value in earlier.items() if not key[1].endswith("_sum"))
        for key, value in present.items():
            total[key] = total.get(key, 0.0) + value - (0.0 if is_new else earlier.get(key, 0.0))
    return total


def figures_of(numbers: GatewayNumbers, model: str, version: int) -> VersionFigures:
    """Returns the figures of a version, from the result of `added`."""
    version_numbers = {
        (key[0], key[1], *key[4:]): value for key, value in numbers.items() if key[2:4] == (model, str(version))
    }

    def count(instrument: str, *labels: str) -> float:
        return version_numbers.get((instrument, *labels), 0.0)

    requests, copies = Metrics.REQUEST_DURATION.name, Metrics.SHADOW_COPIES.name
    errors = sum(count(requests, "_count", status) for status in _FAULTS)
    return VersionFigures(
        requests=count(requests, "_count", "OK") + errors,
        errors=errors,
        answers=count(Metrics.VERSION_DURATION.name, "_count", "answer"),
        p99_s=_quantile(version_numbers, 0.99),
        copies=count(Metrics.SHADOW_AGREEMENT.name, "_count") + count(copies, "_total", "failed"),
        agreement=count(Metrics.SHADOW_AGREEMENT.name, "_sum"),
    )


def _quantile(numbers: Mapping[tuple[str, ...], float], share: float) -> float | None:
    """Returns a quantile of the answers as Prometheus' histogram_quantile does: values spread evenly in a bucket."""
    head = (Metrics.VERSION_DURATION.name, "_bucket", "answer")
    reached = sorted((float(key[3]), value) for key, value in numbers.items() if key[:3] == head)
    wanted = share * reached[-1][1] if reached else 0.0
    if not wanted:
        return None
    below_s, below = 0.0, 0.0
    for bound_s, count in reached:
        if count >= wanted:
            # A value beyond the last bound counts as the bound, because nothing else of it is known.
            inside = (wanted - below) / (count - below)
            return below_s if bound_s == float("inf") else below_s + (bound_s - below_s) * inside
        below_s, below = bound_s, count
    return below_s


GuardName = Literal["p99", "p99_s", "errors", "agreement"]
_OF_P99: tuple[GuardName, ...] = ("p99", "p99_s")
_UNITS = {"%": 0.01, "ms": 0.001, "s": 1.0, "": 1.0}
# A percentile of few requests says little: before a step's time is over, p99 fails only with N times the need.
_EARLY = 10


@dataclass(frozen=True, slots=True)
class PromotionGuard:
    """A limit.

    - `p99`: the version's computed answers take at most this number of times the other version's time.
    - `p99_s`: either version's computed answers take at most this number of seconds.
    - `errors`: the share of failed requests may exceed the other version's share by this, 0 to 1.
    - `agreement`: the least mean agreement of copies of requests, 0 to 1; a copy that fails has 0.
    """

    name: GuardName
    limit: float

    @classmethod
    def parse(cls, text: str) -> "PromotionGuard":
        """Parses a guard such as p99=1.2, p99=300ms, errors=0.1% or agreement=0.99. Raises SetupError."""
        word, _, number = text.partition("=")
        unit = next(unit for unit in _UNITS if number.endswith(unit))
        is_time = unit in ("ms", "s")
        name = "p99_s" if word == "p99" and is_time else word
        try:
            limit = float(number.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            limit = float("nan")
        if name not in get_args(GuardName) or is_time != (name == "p99_s") or not 0 <= limit < float("inf"):
            raise SetupError(f"--guard {text!r}: must be one of p99=1.2, p99=300ms, errors=0.1%, agreement=0.99")
        if name == "p99" and limit < 1:
            raise SetupError(f"--guard {text}: must be 1 or more: how many times as long answers may take")
        if name == "p99_s" and not limit:
            raise SetupError(f"--guard {text}: must be longer than 0")
        if name in ("errors", "agreement") and limit > 1:
            raise SetupError(f"--guard {text}: must be from 0 to 1, or from 0% to 100%")
        return cls(cast(GuardName, name), limit)

    def problem(self, stable: VersionFigures, canary: VersionFigures, least: int, *, is_over: bool) -> str:
        """Returns the reason why the guard fails; empty while it holds. `is_over`: whether the step's time is over.

        If there are fewer than `least` requests, the missing requests count as good requests for errors and agreement.
        So a bad version is found early, but one bad request among a few does not fail the guard.
        """
        if self.name in _OF_P99:
            needed = least if is_over else least * _EARLY
            if min(stable.answers, canary.answers) < needed or not (stable.p99_s and canary.p99_s):
                return ""
            if self.name == "p99_s":
                longer_s = max(stable.p99_s, canary.p99_s)
                return f"p99 is {longer_s:.3g} s, the guard is {self.limit:g} s" if longer_s > self.limit else ""
            ratio = canary.p99_s / stable.p99_s
            return f"p99 is {ratio:.2f} times as long, the guard is {self.limit:g}" if ratio > self.limit else ""
        if self.name == "errors":
            share = canary.errors / max(canary.requests, least)
            allowed = stable.error_share + self.limit
            problem = f"{canary.error_share:.2%} of the requests fail, the guard is {allowed:.2%}"
            return problem if share > allowed else ""
        missing = (canary.copies - canary.agreement) / max(canary.copies, least)
        problem = f"agreement is {canary.mean_agreement:.4f}, the guard is {self.limit:g}"
        return problem if missing > 1 - self.limit else ""

    def lacks(self, stable: VersionFigures, canary: VersionFigures, least: int) -> str:
        """Returns the missing evidence for a judgement; empty if there is enough."""
        if self.name == "agreement":
            return f"{canary.copies:.0f} copies of {least}" if canary.copies < least else ""
        counts = (stable.answers, canary.answers) if self.name in _OF_P99 else (stable.requests, canary.requests)
        return f"{counts[0]:.0f} and {counts[1]:.0f} requests of {least}" if min(counts) < least else ""


def describe(guards: Sequence[PromotionGuard], stable: VersionFigures, canary: VersionFigures) -> str:
    """Returns the measured figures of the guards, and the number of requests."""
    parts = [f"{stable.requests:.0f} and {canary.requests:.0f} requests"]
    for guard in guards:
        if guard.name in _OF_P99 and stable.p99_s and canary.p99_s:
            parts.append(f"p99 {1000 * stable.p99_s:.3g} and {1000 * canary.p99_s:.3g} ms")
        elif guard.name == "errors":
            parts.append(f"errors {stable.error_share:.2%} and {canary.error_share:.2%}")
        elif guard.name == "agreement":
            parts.append(f"agreement {canary.mean_agreement:.4f} of {canary.copies:.0f} copies")
    return ", ".join(dict.fromkeys(parts))


# The percentage of requests that are copied if a guard compares copies and the route copies none.
_COPIED_PERCENT = 10.0
# After this number of failed reads in a row, the version may have ended the gateway.
_MOST_FAILED_READS = 3
_ALL = 100.0


@dataclass(frozen=True, slots=True)
class PromotionPlan:
    """A promotion.

    - `target`: an alias or a version.
    - `steps`: rising percentages of the requests without a version; the last step, 100, makes the target `stable`.
    - `step_s`: the least seconds of each other step.
    - `least`: the requests that each guard needs for its judgement; a step continues until there are enough.
    - `look_s`: the seconds between two reads of the metrics.
    """

    model: str
    target: str
    guards: Sequence[PromotionGuard]
    steps: Sequence[float]
    step_s: float
    least: int
    look_s: float

    def __post_init__(self) -> None:
        """Raises SetupError."""
        rises = all(lower < higher for lower, higher in zip(self.steps, self.steps[1:], strict=False))
        if not self.steps or not rises or self.steps[0] <= 0 or self.steps[-1] > _ALL:
            raise SetupError("--steps: must be percentages that rise, above 0 and up to 100, as in 5,25,50,100")


class GuardFailed(Exception):
    """The version did not keep a guard, and requests are as before."""


class _Changed(Exception):
    """Another author changed the model's routing meanwhile."""


class Promotion:
    """The run of a plan. `change`: applies an operation to the registry. `read`: returns the metrics of all gateways,
    and raises SetupError if they cannot be read. `tell`: reports progress.
    """

    def __init__(
        self,
        plan: PromotionPlan,
        change: Callable[[Operation, Signed], Registry],
        read: Callable[[], Sequence[GatewayNumbers]],
        tell: Callable[[str], None],
        signed: Signed,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._change = change
        self._read = read
        self._tell = tell
        self._signed = signed
        self._sleep = sleep
        self._clock = clock
        # The routing before the run, and every routing that this run has set since.
        self._routings: list[Routing] = []
        self._stable = self._canary = 0

    def run(self, registry: Registry) -> None:
        """Moves the version up step by step.

        If an error or an interrupt ends the run early, restores the routing from before the run, unless another author
        has changed it. The aliases change only at the end. Raises SetupError, GuardFailed, and errors of changing and
        reading.
        """
        self._begin(registry)
        measured = ""
        try:
            for percent in self._plan.steps:
                if percent >= _ALL:
                    self._finish(measured)
                    return
                self._set(self._step(percent), f"promote {self._plan.target}: {percent:g} %", measured)
                measured = self._hold()
            self._tell(f"{self._plan.target} stays at {self._plan.steps[-1]:g} %")
        except _Changed:
            raise SetupError(f"model {self._plan.model!r}: another author changed its routing; it is left so") from None
        except BaseException as reason:
            self._go_back(reason)
            raise

    def _begin(self, registry: Registry) -> None:
        plan, model = self._plan, registry.models.get(self._plan.model)
        if model is None:
            raise SetupError(f"model {plan.model!r} is not registered; registered are: {', '.join(registry.models)}")
        if not model.aliases.get(STABLE):
            raise SetupError(f"model {plan.model!r} has no alias {STABLE}, with which {plan.target} could be compared")
        if others := model.route.keys() - {STABLE, plan.target}:
            raise SetupError(f"model {plan.model!r}: {', '.join(sorted(others))} also have shares of its requests")
        self._stable = model.aliases[STABLE]
        if plan.target.isdecimal():
            self._canary = int(plan.target)
        elif plan.target in model.aliases:
            self._canary = model.aliases[plan.target]
        else:
            raise SetupError(f"model {plan.model!r}: {plan.target!r} is neither a version nor one of its aliases")
        if self._canary == self._stable:
            raise SetupError(
                f"model {plan.model!r}: {plan.target} is version {self._canary}, which is {STABLE} already"
            )
        self._routings = [model.routing]

    def _step(self, percent: float) -> Routing:
        original = self._routings[0]
        shadow = original.shadow
        if any(guard.name == "agreement" for guard in self._plan.guards) and not (
            shadow and shadow.target == self._plan.target
        ):
            shadow = Shadow(target=self._plan.target, percent=_COPIED_PERCENT)
        route = {STABLE: _ALL - percent, self._plan.target: percent}
        return Routing(aliases=original.aliases, route=route, shadow=shadow)

    def _hold(self) -> str:
        """Waits until the step is over and has enough evidence. Returns the measured figures. Raises GuardFailed."""
        plan, began_s, reported, failed_reads = self._plan, self._clock(), "", 0
        last: Sequence[GatewayNumbers] = self._read()
        numbers: GatewayNumbers = {}
        while True:
            self._sleep(plan.look_s)
            try:
                now, failed_reads = self._read(), 0
            except SetupError:
                failed_reads += 1
                if failed_reads == _MOST_FAILED_READS:
                    raise
                continue
            numbers, last = added(numbers, last, now), now
            stable, canary = (figures_of(numbers, plan.model, version) for version in (self._stable, self._canary))
            is_over = self._clock() >= began_s + plan.step_s
            measured = describe(plan.guards, stable, canary)
            for guard in plan.guards:
                if problem := guard.problem(stable, canary, plan.least, is_over=is_over):
                    raise GuardFailed(f"{problem} ({measured})")
            if is_over and not (missing := self._missing(stable, canary)):
                self._tell(f"  held: {measured}")
                return measured
            if is_over and missing != reported:
                self._tell(f"  waits: {missing}")
                reported = missing

    def _missing(self, stable: VersionFigures, canary: VersionFigures) -> str:
        lacks = (guard.lacks(stable, canary, self._plan.least) for guard in self._plan.guards)
        return "; ".join(dict.fromkeys(filter(None, lacks)))

    def _finish(self, measured: str) -> None:
        aliases = {**self._routings[0].aliases, STABLE: self._canary}
        action = f"promote {self._plan.target}: version {self._canary} is {STABLE}, it was {self._stable}"
        self._set(Routing(aliases=aliases), action, measured)

    def _go_back(self, reason: BaseException) -> None:
        if len(self._routings) < 2:
            return
        why = str(reason) if isinstance(reason, GuardFailed | SetupError | NeuronpipeError) else "interrupted"
        try:
            self._put_back(why)
        except (KeyboardInterrupt, SystemExit):  # a signal; the reason was an error
            self._put_back(why)
            raise

    def _put_back(self, why: str) -> None:
        try:
            self._set(self._routings[0], f"promote {self._plan.target}: moved back", why)
        except _Changed:
            self._tell("another author changed the routing meanwhile; it is left so")

    def _set(self, routing: Routing, action: str, note: str) -> None:
        """Sets the routing, if it still is as this run left it. Raises _Changed."""

        def operate(registry: Registry) -> Registry:
            if registry.models[self._plan.model].routing not in own_routings:
                raise _Changed
            return registry.set_routing(self._plan.model, routing, action, signed)

        signed = replace(self._signed, note="; ".join(filter(None, (self._signed.note, note))), time=Signed().time)
        own_routings = list(self._routings)
        self._routings.append(routing)  # before it is set, in case of an interrupt
        registry = self._change(operate, signed)
        self._tell(f"revision {registry.revision}: {registry.history[-1].action}")
