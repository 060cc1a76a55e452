"""What the oracle suites share: their comparisons, of which the run ends with a table."""

from collections.abc import Callable

import pytest

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    comparisons = config.stash.get(_COMPARISONS, [])
    if not comparisons:
        return
    terminalreporter.section("compared with the reference")
    terminalreporter.write_line(HEADER)
    for one in comparisons:
        one.write()
        terminalreporter.write_line(one.row())
