"""The parameters of a load test, and their limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.generation import GenerationLoad

if TYPE_CHECKING:
    from neuronpipe.platform.tls import TlsFiles

PRIORITIES = ("interactive", "bulk")

MAX_CONCURRENCY = 10_000
MAX_RATE_PER_S = 100_000
MAX_DURATION_S = 86_400
MAX_WARM_UP_S = 3_600
MAX_PROCESSES = 64
MAX_DEADLINE_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """One run against a gateway.

    With `concurrency` the loop is closed: that many callers, each of which sends its next request when it has its
    answer. With `rate_per_s` it is open: requests are sent at the times of a Poisson process, without waiting for
    answers. With neither, there is one caller. Raises SetupError for a value that is out of range, and names the
    option.
    """

    target: str
    model: str
    version: str = ""
    concurrency: int | None = None
    rate_per_s: float | None = None
    duration_s: float = 10.0
    warm_up_s: float = 1.0
    texts: Path | None = None
    deadline_ms: float | None = None
    priority: str | None = None
    processes: int = 1
    seed: int = 0
    # How long requests in flight at the end may take, at most their deadline.
    drain_s: float = 30.0
    tls: "TlsFiles | None" = None
    # Texts are generated, and read as they come. None: whole answers.
    generation: GenerationLoad | None = None

    def __post_init__(self) -> None:
        if not self.target.strip():
            raise SetupError("--target: is empty")
        if not self.model:
            raise SetupError("--model: is empty")
        if self.rate_per_s is not None and self.concurrency is not None:
            raise SetupError(
                f"--rate {self.rate_per_s:g} and --concurrency {self.concurrency}: give one of them, not both"
            )
        if self.priority not in (None, *PRIORITIES):
            raise SetupError(f"--priority {self.priority}: must be one of {', '.join(PRIORITIES)}")
        if self.concurrency is not None:
            _check_count("--concurrency", self.concurrency, MAX_CONCURRENCY)
        if self.rate_per_s is not None:
            _check_more_than_zero("--rate", self.rate_per_s, MAX_RATE_PER_S, "requests a second")
        if self.deadline_ms is not None:
            _check_more_than_zero("--deadline-ms", self.deadline_ms, MAX_DEADLINE_MS, "ms")
        _check_more_than_zero("--duration", self.duration_s, MAX_DURATION_S, "s")
        if not 0 <= self.warm_up_s <= MAX_WARM_UP_S:  # false for NaN too
            raise SetupError(f"--warm-up {self.warm_up_s:g}: must be from 0 to {MAX_WARM_UP_S:,} s")
        _check_count("--processes", self.processes, MAX_PROCESSES)
        if self.rate_per_s is None and self.processes > self.callers:
            raise SetupError(
                f"--processes {self.processes}: must be at most --concurrency {self.callers}, or some would "
                "have no caller"
            )
        if self.seed < 0:
            raise SetupError(f"--seed {self.seed}: must be 0 or more")

    @property
    def callers(self) -> int:
        """The callers of the closed loop."""
        return 1 if self.concurrency is None else self.concurrency


def _check_count(name: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise SetupError(f"{name} {value}: must be from 1 to {limit:,}")


def _check_more_than_zero(name: str, value: float, limit: float, unit: str) -> None:
    if not 0 < value <= limit:  # false for NaN too
        raise SetupError(f"{name} {value:g}: must be more than 0 and at most {limit:,} {unit}")
