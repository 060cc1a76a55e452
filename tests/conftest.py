"""What all tests share: the models, made once a run."""

import signal
from pathlib import Path

import pytest

from tests.models import make_repository, make_sources


def pytest_configure() -> None:
    # A shell starts what runs in the background with SIGINT ignored, and the processes that tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        metavar="HOST:PORT",
        help="run the behaviour suite against this gateway; see tests/models.py for what it must serve",
    )


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the test models by name, as transformers reads them."""
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with an openvino float32 bundle of each test model."""
    return make_repository(tmp_path_factory.mktemp("repository"), sources)


@pytest.fixture(scope="session")
def fake_repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same models for the fake back end."""
    return make_repository(tmp_path_factory.mktemp("fake-repository"), sources, backend="fake")
