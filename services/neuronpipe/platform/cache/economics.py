"""Decides whether a look-up in Redis saves time: by the settings, or by estimates of its cost and its gain."""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from neuronpipe.core.settings import Settings

CachePolicy = Literal["auto", "always", "never"]


class RedisSettings(Settings):
    """Settings of the shared caches in Redis."""

    redis_url: str = Field(  # may hold a password
        "",
        repr=False,
        description="Redis that shares the caches, as redis://HOST:PORT/0 (see docs/caching.md); empty: none",
    )
    redis_prefix: str = Field(
        "neuronpipe", pattern=r"^[^:]{1,64}$", description="prefix of all keys, no colon; give each deployment its own"
    )
    redis_ttl_s: int = Field(604_800, ge=1, description="seconds after which a value in Redis expires")

    # Longest wait for Redis. Then the request continues without it.
    redis_timeout_ms: ClassVar[int] = 25
    # Connections to Redis of each cache.
    redis_connections: ClassVar[int] = 8


NO_REDIS = RedisSettings()


class CacheCommandSettings(Settings):
    """Settings of `neuronpipe cache`."""

    prefix: ClassVar[str] = "NEURONPIPE_CACHE_"

    redis: RedisSettings


# Storing a value takes three times as long as looking one up (30 and 10 µs, measured 2026-11-21). The ratio is not
# measured at run time: values are stored concurrently with other work, whose time would be included.
_STORE_TO_LOOKUP = 3.0
# The lower quartile estimates the time of the work itself, without other work that the event loop did meanwhile.
_QUANTILE, _STEP = 0.25, 0.1
_HIT_WEIGHT = 0.02
# Lower bound of every estimate.
_LEAST_S = 1e-6
_FIRST_HIT_RATE = 0.5


class RunningQuantile:
    """The lower quartile of a stream of positive numbers, mostly of the last few dozen; 0 before the first number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, number: float) -> None:
        if not self.value:
            self.value = number
        elif number < self.value:
            self.value *= 1 - _STEP * (1 - _QUANTILE)
        else:
            self.value *= 1 + _STEP * _QUANTILE


class LookupEconomics:
    """Compares the time to compute with the time to look up and to store, for inputs of each size (in powers of two).

    A look-up of `n` values takes a fixed time and a time for each value. It saves the time to compute for the share of
    hits; misses have to be stored afterwards. `size`: any measure of an input that grows with the time to compute, here
    its bytes.
    """

    def __init__(self) -> None:
        self._compute_s: dict[int, RunningQuantile] = {}
        self._hit_rates: dict[int, float] = {}
        self._lookup_s, self._lookup_value_s = RunningQuantile(), RunningQuantile()
        # Total time in which computations blocked the event loop.
        self.blocked_s = 0.0

    def computed(self, size: int, seconds: float, blocked_s: float) -> None:
        """Records that a value was computed, which blocked the event loop for `blocked_s`."""
        self.blocked_s += blocked_s
        power = size.bit_length()
        if power not in self._compute_s:
            self._compute_s[power] = RunningQuantile()
        self._compute_s[power].add(seconds)

    def looked_up(self, values: int, seconds: float) -> None:
        """Records a look-up of `values` values. `seconds`: without the time in which the event loop computed."""
        if values == 1:
            self._lookup_s.add(max(seconds, _LEAST_S))
        else:
            self._lookup_value_s.add(max((seconds - self._lookup_s.value) / values, _LEAST_S))

    def found(self, size: int, is_hit: bool) -> None:
        power = size.bit_length()
        rate = self._hit_rates.get(power, _FIRST_HIT_RATE)
        self._hit_rates[power] = rate + _HIT_WEIGHT * (is_hit - rate)

    def choose(self, sizes: Sequence[int]) -> list[bool]:
        """Returns for each of the wanted values whether to look it up.

        Chosen are the values that save time, if together they save more than the look-up costs.
        """
        savings_s = [self.saving_s(size) for size in sizes]
        if sum(saving_s for saving_s in savings_s if saving_s > 0) <= self._lookup_s.value:
            return [False] * len(savings_s)
        return [saving_s > 0 for saving_s in savings_s]

    def saving_s(self, size: int) -> float:
        """Returns the average time that looking up another value saves, without the fixed time of a look-up.

        A size that was never computed is computed first: while all look-ups are hits, the time that they save is
        unknown.
        """
        power = size.bit_length()
        if power not in self._compute_s:
            return -math.inf
        hit_rate = self._hit_rates.get(power, _FIRST_HIT_RATE)
        lookups = 1 + (1 - hit_rate) * _STORE_TO_LOOKUP
        return hit_rate * self._compute_s[power].value - lookups * self._lookup_value_s.value

    def could_save(self, size: int) -> bool:
        """Returns whether a look-up could save time if every look-up were a hit."""
        compute_s = self._compute_s.get(size.bit_length())
        return compute_s is not None and compute_s.value > self._lookup_value_s.value
