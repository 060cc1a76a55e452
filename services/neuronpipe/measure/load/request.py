"""The parameters of a load test, and their limits; for generated texts also their lengths in tokens."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    import numpy as np

    from neuronpipe.platform.tls import TlsFiles


def check_range(option: str, value: float | None, minimum: int | None, maximum: float, unit: str = "") -> None:
    """Raises SetupError, which names the option, for a value that is out of range. `minimum`: None for more than 0."""
    if value is None:
        return
    if not ((value > 0 if minimum is None else minimum <= value) and value <= maximum):  # also for NaN
        bounds = f"more than 0 and at most {maximum:,}" if minimum is None else f"from {minimum} to {maximum:,}"
        raise SetupError(f"{option} {value:g}: must be {bounds} {unit}".rstrip())


MAX_TOKENS = 32_768
FORMS = "N, uniform:LOW,HIGH or lognormal:MEDIAN,P90"

# The 90th percentile of the standard normal distribution.
_NORMAL_P90 = 1.2815515655446004


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, from 1 to MAX_TOKENS: all the same, uniform, or lognormal, as in real prompts."""

    form: str
    low: int
    high: int

    @classmethod
    def fixed(cls, tokens: int) -> Self:
        """Returns lengths that are all the same."""
        return cls("fixed", tokens, tokens)

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Parses one of FORMS. Raises SetupError, which names the option."""
        form, colon, numbers = text.partition(":")
        if not colon:
            form, numbers = "fixed", f"{text},{text}"
        try:
            low, high = (int(number) for number in numbers.split(","))
        except ValueError:
            low = high = 0
        if form not in ("fixed", "uniform", "lognormal") or not 1 <= low <= high <= MAX_TOKENS:
            raise SetupError(f"{option} {text}: must be {FORMS}, of tokens from 1 to {MAX_TOKENS:,}")
        return cls(form, low, high)

    def draw(self, random: "np.random.Generator") -> int:
        """Draws a length. Lognormal lengths beyond MAX_TOKENS are cut."""
        if self.form == "uniform":
            return int(random.integers(self.low, self.high, endpoint=True))
        if self.form == "lognormal":
            sigma = math.log(self.high / self.low) / _NORMAL_P90
            return min(MAX_TOKENS, max(1, round(random.lognormal(math.log(self.low), sigma))))
        return self.low


MAX_LIMIT_MS = 3_600_000
# The gateway's limit (tasks/decoding_checks.py).
MAX_BEAMS = 16
OUTPUT_TOKENS = Lengths.fixed(32)


@dataclass(frozen=True, kw_only=True)
class GenerationLoad:
    """Load of generated texts, which are read in parts.

    `prompt_tokens` None: the prompts are the texts as they are. `first_token_limit_ms` and `token_limit_ms`: an answer
    beyond them does not count as goodput. Raises SetupError if a value is out of range, and names the option.
    """

    prompt_tokens: Lengths | None = None
    output_tokens: Lengths = OUTPUT_TOKENS
    # The number of tokens that begin all prompts.
    shared_prefix_tokens: int = 0
    num_beams: int = 1
    # The form of the texts; empty: any.
    json_schema: str = ""
    first_token_limit_ms: float | None = None
    token_limit_ms: float | None = None

    def __post_init__(self) -> None:
        check_range("--shared-prefix-tokens", self.shared_prefix_tokens, 0, MAX_TOKENS)
        check_range("--num-beams", self.num_beams, 1, MAX_BEAMS)
        check_range("--ttft-ms", self.first_token_limit_ms, None, MAX_LIMIT_MS, "ms")
        check_range("--itl-ms", self.token_limit_ms, None, MAX_LIMIT_MS, "ms")


PRIORITIES = ("interactive", "bulk")

MAX_CONCURRENCY = 10_000
MAX_RATE_PER_S = 100_000
MAX_DURATION_S = 86_400
MAX_WARM_UP_S = 3_600
MAX_PROCESSES = 64
MAX_DEADLINE_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """A run against a gateway.

    With `concurrency` the loop is closed: each of the callers sends its next request when it has its answer. With
    `rate_per_s` it is open: requests are sent at the times of a Poisson process, without waiting for answers. With
    neither, there is one caller. Raises SetupError if a value is out of range, and names the option.
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
    # The time for requests in flight at the end, at most their deadline.
    drain_s: float = 30.0
    tls: "TlsFiles | None" = None
    # Texts are generated, and read in parts. None: whole answers.
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
        check_range("--concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        check_range("--rate", self.rate_per_s, None, MAX_RATE_PER_S, "requests a second")
        check_range("--deadline-ms", self.deadline_ms, None, MAX_DEADLINE_MS, "ms")
        check_range("--duration", self.duration_s, None, MAX_DURATION_S, "s")
        check_range("--warm-up", self.warm_up_s, 0, MAX_WARM_UP_S, "s")
        check_range("--processes", self.processes, 1, MAX_PROCESSES)
        if self.rate_per_s is None and self.processes > self.callers:
            problem = f"must be at most --concurrency {self.callers}, or some would have no caller"
            raise SetupError(f"--processes {self.processes}: {problem}")
        if self.seed < 0:
            raise SetupError(f"--seed {self.seed}: must be 0 or more")

    @property
    def callers(self) -> int:
        """The number of callers of the closed loop."""
        return 1 if self.concurrency is None else self.concurrency
