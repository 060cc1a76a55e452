"""What the oracle suites share: their comparisons, of which the run ends with a table."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.oracle.comparison import HEADER, Comparison

_COMPARISONS = pytest.StashKey[list[Comparison]]()


@pytest.fixture(scope="session")
def comparison(pytestconfig: pytest.Config) -> Callable[[str, str], Comparison]:
    """comparison(name, reference) → a new comparison, which the run's end shows and writes down."""

    def start(name: str, reference: str) -> Comparison:
        started = Comparison(name, reference)
        pytestconfig.stash.setdefault(_COMPARISONS, []).append(started)
        return started

    return start


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_the_reference() -> Iterator[None]:
    """Small models are computed ten times as fast by one thread as by two that wait for each other beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    comparisons = config.stash.get(_COMPARISONS, [])
    if not comparisons:
        return
    terminalreporter.section("compared with the reference")
    terminalreporter.write_line(HEADER)
    for one in comparisons:
        one.write()
        terminalreporter.write_line(one.row())
