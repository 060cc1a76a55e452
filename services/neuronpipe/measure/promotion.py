"""Moves a version of a model up in steps to all of the requests, as long as its guards hold; else back.

Guards compare what the version did with what the version before did, by the metrics of all gateways.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast, get_args

from neuronpipe.bundles.registry import STABLE, Operation, Registry, Routing, Shadow, Signed
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.names import Metrics

# The numbers of a gateway, by what they are: the metric's name, the suffix of its series, the values of its labels, and
# for the suffix _bucket the upper bound. Durations are in seconds.
Numbers: TypeAlias = Mapping[tuple[str, ...], float]

INSTRUMENTS = (Metrics.REQUEST_DURATION, Metrics.VERSION_DURATION, Metrics.SHADOW_AGREEMENT, Metrics.SHADOW_COPIES)

# What a version may be blamed for. Other errors are the caller's, or the gateway's load.
_FAULTS = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS")


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """What a version did.

    `errors`: of `requests`, those that failed by a fault of the server or by their deadline. `p99_s`: of computed
    answers; None without any. `copies`: those that were compared, or failed; `agreement`: their sum, at most `copies`.
    """

    requests: float = 0.0
    errors: float = 0.0
    answers: float = 0.0
    p99_s: float | None = None
    copies: float = 0.0
    agreement: float = 0.0

    @property
    def error_share(self) -> float:
        """Errors to requests."""
        return self.errors / self.requests if self.requests else 0.0

    @property
    def mean_agreement(self) -> float:
        """The mean over copies; 1 without any."""
        return self.agreement / self.copies if self.copies else 1.0


def added(total: Numbers, before: Sequence[Numbers], now: Sequence[Numbers]) -> Numbers:
    """A total with what was added at all gateways, each of which has the same place in both lists."""
    total = dict(total)
    for then, present in zip(before, now, strict=True):
        # A gateway that started anew counts from zero: what it has now was added.
        is_new = any(present.get(key, 0.0) < value for key, value in then.items() if not key[1].endswith("_sum"))
        for key, value in present.items():
            total[key] = total.get(key, 0.0) + value - (0.0 if is_new else then.get(key, 0.0))
    return total


def figures_of(numbers: Numbers, model: str, version: int) -> VersionFigures:
    """The figures of a version, of what `added` returned."""
    own = {(key[0], key[1], *key[4:]): value for key, value in numbers.items() if key[2:4] == (model, str(version))}

    def count(instrument: str, *labels: str) -> float:
        return own.get((instrument, *labels), 0.0)

    requests, copies = Metrics.REQUEST_DURATION.name, Metrics.SHADOW_COPIES.name
    errors = sum(count(requests, "_count", status) for status in _FAULTS)
    return VersionFigures(
        requests=count(requests, "_count", "OK") + errors,
        errors=errors,
        answers=count(Metrics.VERSION_DURATION.name, "_count", "answer"),
        p99_s=_quantile(own, 0.99),
        copies=count(Metrics.SHADOW_AGREEMENT.name, "_count") + count(copies, "_total", "failed"),
        agreement=count(Metrics.SHADOW_AGREEMENT.name, "_sum"),
    )


def _quantile(own: Mapping[tuple[str, ...], float], share: float) -> float | None:
    """A quantile of the answers, as Prometheus' histogram_quantile estimates it: values lie evenly in their bucket."""
    head = (Metrics.VERSION_DURATION.name, "_bucket", "answer")
    reached = sorted((float(key[3]), value) for key, value in own.items() if key[:3] == head)
    wanted = share * reached[-1][1] if reached else 0.0
    if not wanted:
        return None
    below_s, below = 0.0, 0.0
    for bound_s, count in reached:
        if count >= wanted:
            # Beyond the last bound nothing is known but that bound.
            inside = (wanted - below) / (count - below)
            return below_s if bound_s == float("inf") else below_s + (bound_s - below_s) * inside
        below_s, below = bound_s, count
    return below_s


GuardName = Literal["p99", "p99_s", "errors", "agreement"]
_OF_P99: tuple[GuardName, ...] = ("p99", "p99_s")
_UNITS = {"%": 0.01, "ms": 0.001, "s": 1.0, "": 1.0}
# A percentile of few requests says little, so before its time is over a step fails by p99 only from so many times as
# many on as it needs.
_EARLY = 10


@dataclass(frozen=True, slots=True)
class Guard:
    """One limit.

    `p99`: of the version's computed answers, at most so many times that of the other; `p99_s`: of either version's, at
    most so many seconds. `errors`: the share of its requests that fail may be so much larger than the other's, 0 to 1.
    `agreement`: the mean agreement of copies of requests is at least this, 0 to 1; a copy that fails has 0.
    """

    name: GuardName
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Guard":
        """A guard as in p99=1.2, p99=300ms, errors=0.1% and agreement=0.99. Raises SetupError."""
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
        """Why the guard fails; empty while it does not. `is_over`: whether the time of the step is.

        Errors and disagreement count as if the requests that are missing to `least` all went well: a bad version is
        found early, and one bad request of a few is none.
        """
        if self.name in _OF_P99:
            needed = least if is_over else least * _EARLY
            if min(stable.answers, canary.answers) < needed or not (stable.p99_s and canary.p99_s):
                return ""
            if self.name == "p99_s":
                longer_s = max(stable.p99_s, canary.p99_s)
                return f"p99 is {longer_s:.3g} s, the guard is {self.limit:g} s" * (longer_s > self.limit)
            ratio = canary.p99_s / stable.p99_s
            return f"p99 is {ratio:.2f} times as long, the guard is {self.limit:g}" if ratio > self.limit else ""
        if self.name == "errors":
            share = canary.errors / max(canary.requests, least)
            allowed = stable.error_share + self.limit
            return f"{canary.error_share:.2%} of the requests fail, the guard is {allowed:.2%}" * (share > allowed)
        missing = (canary.copies - canary.agreement) / max(canary.copies, least)
        return f"agreement is {canary.mean_agreement:.4f}, the guard is {self.limit:g}" * (missing > 1 - self.limit)

    def lacks(self, stable: VersionFigures, canary: VersionFigures, least: int) -> str:
        """What there is too little of to judge; empty for enough."""
        if self.name == "agreement":
            return f"{canary.copies:.0f} copies of {least}" * (canary.copies < least)
        found = (stable.answers, canary.answers) if self.name in _OF_P99 else (stable.requests, canary.requests)
        return f"{found[0]:.0f} and {found[1]:.0f} requests of {least}" * (min(found) < least)


def describe(guards: Sequence[Guard], stable: VersionFigures, canary: VersionFigures) -> str:
    """What was measured, of the guards and how much there was of it."""
    found = [f"{stable.requests:.0f} and {canary.requests:.0f} requests"]
    for guard in guards:
        if guard.name in _OF_P99 and stable.p99_s and canary.p99_s:
            found.append(f"p99 {1000 * stable.p99_s:.3g} and {1000 * canary.p99_s:.3g} ms")
        elif guard.name == "errors":
            found.append(f"errors {stable.error_share:.2%} and {canary.error_share:.2%}")
        elif guard.name == "agreement":
            found.append(f"agreement {canary.mean_agreement:.4f} of {canary.copies:.0f} copies")
    return ", ".join(dict.fromkeys(found))


# Of the requests, where a guard compares copies and the route has none.
_COPIED_PERCENT = 10.0
# A gateway whose metrics cannot be read so many times in a row may have ended by the version.
_MOST_FAILED_READS = 3
_ALL = 100.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be promoted and how.

    `target`: an alias or a version. `steps`: percentages of the requests without a version, rising; 100, the last one,
    makes it `stable`. Each other step lasts `step_s` seconds, and until there are `least` requests to judge each guard
    by. `look_s`: the time between two looks at the metrics.
    """

    model: str
    target: str
    guards: Sequence[Guard]
    steps: Sequence[float]
    step_s: float
    least: int
    look_s: float

    def __post_init__(self) -> None:
        """Raises SetupError."""
        rises = all(one < other for one, other in zip(self.steps, self.steps[1:], strict=False))
        if not self.steps or not rises or self.steps[0] <= 0 or self.steps[-1] > _ALL:
            raise SetupError("--steps: must be percentages that rise, above 0 and up to 100, as in 5,25,50,100")


class GuardFailed(Exception):
    """The version did not keep a guard, and requests are as before."""


class _Changed(Exception):
    """Somebody else changed the model's routing meanwhile."""


class Promotion:
    """One run. `change`: applies an operation to the registry. `read`: the metrics of all gateways. Raises SetupError
    where they cannot be read. `tell`: says what happens.
    """

    def __init__(
        self,
        plan: Plan,
        change: Callable[[Operation, Signed], Registry],
        read: Callable[[], Sequence[Numbers]],
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
        # What there was, and what this run has set since.
        self._routings: list[Routing] = []
        self._stable = self._canary = 0

    def run(self, registry: Registry) -> None:
        """Moves the version up step by step. On whatever ends it early, an interrupt too, requests get what they got
        before; the aliases do not change before the end. Only somebody else's change of the routing is left as it is.

        Raises SetupError, GuardFailed, and what changing and reading raise.
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
        before = self._routings[0]
        shadow = before.shadow
        if any(guard.name == "agreement" for guard in self._plan.guards) and not (
            shadow and shadow.target == self._plan.target
        ):
            shadow = Shadow(target=self._plan.target, percent=_COPIED_PERCENT)
        route = {STABLE: _ALL - percent, self._plan.target: percent}
        return Routing(aliases=before.aliases, route=route, shadow=shadow)

    def _hold(self) -> str:
        """Waits until the step is over and there is enough to judge. Returns what was measured. Raises GuardFailed."""
        plan, began_s, told, failed_reads = self._plan, self._clock(), "", 0
        last: Sequence[Numbers] = self._read()
        numbers: Numbers = {}
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
            if is_over and missing != told:
                self._tell(f"  waits: {missing}")
                told = missing

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
            self._set(self._routings[0], f"promote {self._plan.target}: moved back", why)
        except _Changed:
            self._tell("another author changed the routing meanwhile; it is left so")

    def _set(self, routing: Routing, action: str, note: str) -> None:
        """Sets the routing, if it still is as this run left it. Raises _Changed."""

        def operate(registry: Registry) -> Registry:
            if registry.models[self._plan.model].routing not in ours:
                raise _Changed
            return registry.set_routing(self._plan.model, routing, action, signed)

        signed = replace(self._signed, note="; ".join(filter(None, (self._signed.note, note))), time=Signed().time)
        ours = list(self._routings)
        self._routings.append(routing)  # before it is set, for whoever interrupts this
        registry = self._change(operate, signed)
        self._tell(f"revision {registry.revision}: {registry.history[-1].action}")
