"""What all tests share: the models, made once a run."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from neuronpipe.core import neuron
from neuronpipe.core.neuron import DOUBLES_VARIABLE
from tests.models import NEURONX_MODELS, make_repository, make_sources

DOUBLES = Path(__file__).parent / "doubles"


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
def neuron_double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The contract double of the Neuron SDK on the path of this process and of those that it starts, with four simulated cores.

    This process's machine itself seems to have no device. Gives the environment of another machine, with two cores, for a process that
    shall have cores of its own.
    """
    path = os.environ.get("PYTHONPATH", "")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(DOUBLES), path] if path else [str(DOUBLES)]),
        DOUBLES_VARIABLE: "1",
        "NEURON_DOUBLE_DEVICES": "2",
        "NEURON_DOUBLE_FOLDER": str(tmp_path_factory.mktemp("neuron")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOUBLES)
        patch.setattr(neuron, "DEVICE_FOLDER", tmp_path_factory.mktemp("dev"))
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment | {"NEURON_DOUBLE_DEVICES": "1", "NEURON_DOUBLE_FOLDER": str(tmp_path_factory.mktemp("other-neuron"))}


@pytest.fixture(scope="session")
def neuronx_repository(neuron_double: Mapping[str, str], sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each task, compiled for the double of Neuron."""
    folder = tmp_path_factory.mktemp("neuronx-sources")
    of_each_task = {name: sources[name] if name in sources else make(folder) for name, (_, make) in NEURONX_MODELS.items()}
    return make_repository(
        tmp_path_factory.mktemp("neuronx-repository"), of_each_task, backend="neuronx", buckets=("1x16", "4x64", "16x64")
    )


@pytest.fixture(scope="session")
def torch_repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same models, exported from PyTorch."""
    return make_repository(tmp_path_factory.mktemp("torch-repository"), sources, backend="torch")


@pytest.fixture(scope="session")
def fake_repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same models for the fake back end."""
    return make_repository(tmp_path_factory.mktemp("fake-repository"), sources, backend="fake")
