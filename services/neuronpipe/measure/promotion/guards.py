"""The limits that a version must keep while it gets more requests, as it is compared with the version that has them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.promotion.figures import VersionFigures

GuardName = Literal["p99", "p99_s", "errors", "agreement"]
_NAMES: dict[tuple[str, bool], GuardName] = {  # by the word and whether it limits a time
    ("p99", False): "p99",
    ("p99", True): "p99_s",
    ("errors", False): "errors",
    ("agreement", False): "agreement",
}
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
        name = _NAMES.get((word, unit in ("ms", "s")))
        try:
            limit = float(number.removesuffix(unit)) * _UNITS[unit]
        except ValueError:
            limit = float("nan")
        if name is None or not 0 <= limit < float("inf"):
            raise SetupError(f"--guard {text!r}: must be one of p99=1.2, p99=300ms, errors=0.1%, agreement=0.99")
        if name == "p99" and limit < 1:
            raise SetupError(f"--guard {text}: must be 1 or more: how many times as long answers may take")
        if name == "p99_s" and not limit:
            raise SetupError(f"--guard {text}: must be longer than 0")
        if name in ("errors", "agreement") and limit > 1:
            raise SetupError(f"--guard {text}: must be from 0 to 1, or from 0% to 100%")
        return cls(name, limit)

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
