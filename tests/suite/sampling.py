"""Samples a large matrix, and suites that take long, in each test run.

`make oracle`, `make sampled` and `make long` run all cases.
"""

import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

_Case = TypeVar("_Case")

DEFAULT_SHARE = 0.1
DEFAULT_SEED = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """The share of each matrix, from above 0 to 1, and the seed that its cases are drawn from: what --share and
    --share-seed say.
    """

    share: float = DEFAULT_SHARE
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:  # true for NaN too
            raise ValueError(f"a share of {self.share} of the cases: must be more than 0 and at most 1")

    @property
    def is_whole(self) -> bool:
        """Whether every case is compared."""
        return self.share == 1

    def describe(self) -> str:
        """Describes the sample for the header of a run and for its table."""
        return "all cases" if self.is_whole else f"a sample of {self.share:g} of the cases, seed {self.seed}"

    def some(self, names: Sequence[str]) -> list[str]:
        """Draws the sample's share of these names, but at least one name."""
        return random.Random(self.seed).sample(names, math.ceil(self.share * len(names)))

    def left_out(self, items: Iterable[pytest.Item]) -> set[pytest.Item]:
        """Returns the tests with the markers `sampled` and `long` that do not run. In each file some of them run."""
        files: dict[Path, dict[str, pytest.Item]] = {}
        for item in items:
            if item.get_closest_marker("sampled") or item.get_closest_marker("long"):
                files.setdefault(item.path, {})[item.nodeid] = item
        return {tests[name] for tests in files.values() for name in tests.keys() - set(self.some(list(tests)))}

    def draw(self, cases: Iterable[_Case], options: Callable[[_Case], object], *, at_least: int) -> list[_Case]:
        """Returns the sample's cases, in their order.

        `options` gives the other properties of a case than its texts, by name or by place. Each value of each property
        is in the sample at least once, and so is each set of names. `at_least`: the number of cases that the suite is
        meant to have. Raises AssertionError if there are fewer.
        """
        every = list(cases)
        assert len(every) >= at_least, f"{len(every)} cases, expected {at_least}"
        if self.is_whole:
            return every
        order = list(range(len(every)))
        random.Random(self.seed).shuffle(order)
        seen: set[Hashable] = set()
        needed: list[int] = []
        others: list[int] = []
        for index in order:
            values = set(_values(options(every[index])))
            (others if values <= seen else needed).append(index)
            seen |= values
        count = math.ceil(self.share * len(every))
        chosen = [*needed, *others[: max(0, count - len(needed))]]
        return [every[index] for index in sorted(chosen)]


def sample_of(config: pytest.Config) -> Sample:
    """Returns the sample that the command line asks for."""
    return Sample(config.getoption("share"), config.getoption("share_seed"))


def _values(options: object) -> Iterable[Hashable]:
    if isinstance(options, Mapping):
        return [tuple(sorted(options)), *((name, repr(value)) for name, value in options.items())]
    assert isinstance(options, Iterable)
    return [(place, repr(value)) for place, value in enumerate(options)]
