"""Shares the models, which are made once a run, among all tests, and distributes the tests among processes."""

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from demo import processes
from neuronpipe.platform.process import worker
from neuronpipe.stages.neuron_executor.runtimes import neuron
from neuronpipe.stages.neuron_executor.runtimes.neuron import DOUBLES_VARIABLE
from tests.oracle.comparison import HEADER, PROPERTY, row, write
from tests.suite import commands
from tests.suite.distribution import Scheduling, order_of
from tests.suite.forked import ForkedWorkers, Forks
from tests.suite.sampling import DEFAULT_SEED, DEFAULT_SHARE, sample_of
from tests.suite.shared_folder import shared_folder

DOUBLES = Path(__file__).parent / "doubles"
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# jsonschema would compile its grammars of IRIs, which no test reads, for two seconds.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # so that the import fails


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what runs in the background with SIGINT ignored, and the processes that tests interrupt would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("numprocesses", None):  # the process that shares tests out needs no torch, which is slow
        # Raised inside PyTorch and transformers while a module is traced; nothing that we call.
        config.addinivalue_line("filterwarnings", "ignore::torch.jit.TracerWarning")
        # Imported and collected objects never become garbage: a search for garbage takes a third of a second each time.
        gc.disable()
    if _IS_WORKER:
        import torch

        # Threads of one worker, and of its processes, would wait for the threads of another worker.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        metavar="HOST:PORT",
        help="run the behaviour suite against this gateway; see tests/models/repository.py for what it must serve",
    )
    parser.addoption(
        "--target-tls",
        metavar="FOLDER",
        help="call --target over TLS, with the files tls.crt, tls.key and ca.crt of this folder",
    )
    parser.addoption(
        "--share",
        type=float,
        default=DEFAULT_SHARE,
        metavar="SHARE",
        help="tested share of the oracle suites' cases, and of the cases of other large matrices: up to 1 for all "
        "(default: %(default)s)",
    )
    parser.addoption(
        "--share-seed",
        type=int,
        default=DEFAULT_SEED,
        metavar="SEED",
        help="seed by which these cases are drawn (default: %(default)s)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"large matrices: {sample_of(config).describe()}"


# The last to look: a test that -k names is a whole sample.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = sample_of(config).left_out(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if _IS_WORKER:
        items.sort(key=lambda item: order_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows and writes down how the oracle suites compared."""
    reports = [
        report
        for several in terminalreporter.stats.values()
        for report in several
        if isinstance(report, pytest.TestReport)
    ]
    records: list[Any] = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if not records:
        return
    scopes = ", ".join(dict.fromkeys(record["scope"] for record in records))
    terminalreporter.section(f"compared with the reference: {scopes}")
    terminalreporter.write_line(HEADER)
    for record in sorted(records, key=lambda record: str(record["name"])):
        write(record)
        terminalreporter.write_line(row(record))


def _models() -> Any:
    """Imports tests.models.repository, which takes seconds. The process that distributes the tests does not need it."""
    from tests.models import repository

    return repository


@pytest.fixture(scope="session", autouse=True)
def _services_are_forks() -> Iterator[None]:
    with closing(Forks()) as forks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_module", forks.start)
        patch.setattr(commands, "start_command", forks.start_command)
        patch.setattr(worker, "multiprocessing", ForkedWorkers())
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Makes the folders of the test models, as transformers reads them. Returns them by name."""
    make_sources = _models().make_sources
    made: dict[str, Path] = make_sources(shared_folder(tmp_path_factory, "sources", make_sources))
    return made


@pytest.fixture(scope="session")
def repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository with an openvino float32 bundle of each test model."""
    return shared_folder(tmp_path_factory, "repository", lambda folder: _models().make_repository(folder, sources))


@pytest.fixture(scope="session")
def neuron_double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Puts the Neuron SDK's contract double, with four simulated cores, on the path of this process and its children.

    The machine of this process seems to have no device. Yields the environment of another machine with two cores, for a
    process that needs its own cores.
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
        yield environment | {
            "NEURON_DOUBLE_DEVICES": "1",
            "NEURON_DOUBLE_FOLDER": str(tmp_path_factory.mktemp("other-neuron")),
        }


@pytest.fixture(scope="session")
def neuronx_repository(
    neuron_double: Mapping[str, str], sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Compiles a model of each task for the double of Neuron."""

    def make(folder: Path) -> None:
        added = tmp_path_factory.mktemp("neuronx-sources")
        of_each_task = {
            name: sources[name] if name in sources else make_source(added)
            for name, (_, make_source) in _models().NEURONX_MODELS.items()
        }
        _models().make_repository(folder, of_each_task, backend="neuronx", buckets=("1x16", "4x64", "16x64"))

    return shared_folder(tmp_path_factory, "neuronx-repository", make)


@pytest.fixture(scope="session")
def torch_repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository of the same models, exported from PyTorch."""
    return shared_folder(
        tmp_path_factory, "torch-repository", lambda folder: _models().make_repository(folder, sources, backend="torch")
    )


@pytest.fixture(scope="session")
def fake_repository(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository of the same models for the fake back end."""
    return shared_folder(
        tmp_path_factory, "fake-repository", lambda folder: _models().make_repository(folder, sources, backend="fake")
    )


@pytest.fixture(scope="session")
def http_repository(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a repository of the fake models, and of a model for each task that they lack."""
    from tests.systems.http_server import make_http_repository

    return shared_folder(
        tmp_path_factory, "http-repository", lambda folder: make_http_repository(folder, fake_repository)
    )
