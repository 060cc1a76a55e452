"""What the oracle suites share: their servers, their comparisons, which the run's end shows and writes down, and the
sample of their cases.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
import torch

from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from tests.oracle.comparison import PROPERTY, Comparison
from tests.oracle.serving import Served, serving
from tests.suite.sampling import Sample, sample_of

_Case = TypeVar("_Case")


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


@pytest_asyncio.fixture(scope="module")
async def served(
    request: pytest.FixtureRequest,
    asked: Set[str],
    sources: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Served]:
    """The models of the file's fixture `sources` for its `TASK`; an empty task is found by a model's files."""
    named = {name: (request.module.TASK, source) for name, source in sources.items() if name in asked}
    async with serving(tmp_path_factory.mktemp("repository"), named) as running:
        yield running


class Suite:
    """A suite whose models are served, in one test."""

    def __init__(self, served: Served, sample: Sample, comparison: Callable[[str, str], Comparison]) -> None:
        self.served = served
        self._sample = sample
        self.comparison = comparison
        # How many cases were drawn last.
        self.drawn = 0

    async def answers(
        self,
        model: str,
        cases: Iterable[_Case],
        options: Callable[[_Case], object],
        make: Callable[[_Case], TaskInput],
        *,
        at_least: int,
    ) -> list[tuple[_Case, InferResponse]]:
        """The sample of the cases, each with the model's answer; see `Sample.draw`."""
        drawn = self._sample.draw(cases, options, at_least=at_least)
        self.drawn = len(drawn)
        outcomes = await self.served.infer_all(model, [make(case) for case in drawn])
        for case, outcome in zip(drawn, outcomes, strict=True):
            assert outcome.HasField("response"), (case, outcome.error.message)
        return [(case, outcome.response) for case, outcome in zip(drawn, outcomes, strict=True)]


@pytest.fixture
def suite(served: Served, sample: Sample, comparison: Callable[[str, str], Comparison]) -> Suite:
    return Suite(served, sample, comparison)


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
    request.node.user_properties += [(PROPERTY, compared.record()) for compared in started]


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_the_reference() -> Iterator[None]:
    """Small models are computed ten times as fast by one thread as by two that wait for each other beside other
    processes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
