"""Distributions of lengths in tokens."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    import numpy as np

MAX_TOKENS = 32_768
FORMS = "N, uniform:LOW,HIGH or lognormal:MEDIAN,P90"

# The 90th percentile of the standard normal distribution.
_NORMAL_P90 = 1.2815515655446004


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, from 1 to MAX_TOKENS: all the same, uniform, or lognormal, as those of real prompts are."""

    form: str
    low: int
    high: int

    @classmethod
    def fixed(cls, tokens: int) -> Self:
        """All the same."""
        return cls("fixed", tokens, tokens)

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """One of FORMS. Raises SetupError, which names the option."""
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
        """A length. Lognormal ones beyond MAX_TOKENS are cut."""
        if self.form == "uniform":
            return int(random.integers(self.low, self.high, endpoint=True))
        if self.form == "lognormal":
            sigma = math.log(self.high / self.low) / _NORMAL_P90
            return min(MAX_TOKENS, max(1, round(random.lognormal(math.log(self.low), sigma))))
        return self.low
