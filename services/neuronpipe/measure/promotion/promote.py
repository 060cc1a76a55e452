"""Steps up, and the way back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from neuronpipe.bundles.registry import STABLE, Operation, Registry, Routing, Shadow, Signed
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.measure.promotion.figures import Numbers, VersionFigures, added, figures_of
from neuronpipe.measure.promotion.guards import Guard, describe

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
            raise SetupError(f"model {self._plan.model!r}: somebody else changed its routing; it is left so") from None
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
            raise SetupError(f"model {plan.model!r}: {', '.join(sorted(others))} have shares of its requests, too")
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
            self._tell("somebody else changed the routing meanwhile; it is left so")

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
