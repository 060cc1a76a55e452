"""The stack, once for all tests. `make e2e` builds its images and says by the environment which they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.models.repository import MODELS


@pytest.fixture(scope="session")
def stack(sources: dict[str, Path]) -> Iterator[Stack]:
    """All services healthy, with a bundle of each test model; nothing is left of it afterwards."""
    Stack().down()
    started = Stack()
    try:
        started.compile(sources, {name: task for name, (task, _) in MODELS.items()})
        started.up()
        yield started
    finally:
        started.down()
    assert started.leftovers() == []
