"""What versions of a model did in a time, of the metrics of all gateways at its beginning and end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
