"""What the oracle suites share: their comparisons, which the run's end shows and writes down, and the sample of their
cases.
"""

from collections.abc import Callable, Iterator, Set

import pytest
import torch

from tests.oracle.comparison import PROPERTY, Comparison
from tests.suite.sampling import Sample, sample_of


@pytest.fixture(scope="session")
def sample(pytestconfig: pytest.Config) -> Sample:
    """The part of each suite's cases that is compared."""
    return sample_of(pytestconfig)


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Set[str]:
    """The models that a run's tests of the file name as a parameter; no others need a bundle."""
    return {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, str)
    }


@pytest.fixture
def comparison(request: pytest.FixtureRequest, sample: Sample) -> Iterator[Callable[[str, str], Comparison]]:
    """comparison(name, reference) → a new comparison, which goes with the test's report to where the run's end is
    shown.
    """
    started: list[Comparison] = []

    def start(name: str, reference: str) -> Comparison:
        started.append(Comparison(name, reference, sample.describe()))
        return started[-1]

    yield start
    request.node.user_properties += [(PROPERTY, one.record()) for one in started]


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_the_reference() -> Iterator[None]:
    """Small models are computed ten times as fast by one thread as by two that wait for each other beside other
    processes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
