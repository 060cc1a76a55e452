"""The systems under test: local stages, four processes, two processes with unix sockets, one process, and front
processes, or the one that --target names.
"""

import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import AsyncClient, Client, TlsFiles
from tests.suite.constants import constants
from tests.suite.shared_folder import shared_folder
from tests.systems.http_server import HttpServer, running_http_server
from tests.systems.pipelines import UNPREPARED, System, local_system, make_slow, two_processes

# system → the fixture of its address.
_TARGETS = {
    "target": "gateway_target",
    "four processes": "gateway_target",
    "two processes": "unix_target",
    "one process": "one_process_target",
    "front processes": "fronts_target",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "system" in metafunc.fixturenames:
        systems = ["local", *(name for name in _TARGETS if name != "target")]
        if metafunc.config.getoption("target"):
            systems = ["target"]
        metafunc.parametrize("system", systems, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("target"):
        reason = "--target is a system that stays as it is; this test starts and breaks one of its own"
        for item in items:
            if item.get_closest_marker("local_only"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the processes of a test look at the registry ten times a second."""
    for name, value in constants(look_every_s=0.1).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def pipeline_processes(repository: Path) -> Iterator[dict[str, ServiceProcess]]:
    """The four services over the openvino bundles."""
    with four_processes(repository, environment=UNPREPARED) as processes:
        yield processes


@pytest.fixture(scope="session")
def one_process(repository: Path) -> Iterator[ServiceProcess]:
    """The pipeline in one process behind gRPC, over the same bundles."""
    with ServiceProcess("all", "--repository", str(repository), environment=UNPREPARED) as process:
        yield process.wait_until_ready()


@pytest.fixture(scope="session")
def one_process_target(one_process: ServiceProcess) -> str:
    """HOST:PORT of it."""
    return one_process.target


@pytest.fixture(scope="session")
def fronts_target(repository: Path) -> Iterator[str]:
    """HOST:PORT of two front processes before one executor."""
    options = ("--repository", str(repository), "--front-processes", "2")
    with ServiceProcess("all", *options, environment=UNPREPARED) as process:
        yield process.wait_until_ready().target


@pytest.fixture(scope="session")
def unix_target(repository: Path) -> Iterator[str]:
    """The unix socket of a gateway that has the tokenizer and the postprocessor inside."""
    with two_processes(repository) as processes:
        yield processes["gateway"].target


@pytest.fixture(scope="session")
def gateway_target(request: pytest.FixtureRequest) -> str:
    """HOST:PORT of a gateway that serves the test models."""
    target: str | None = request.config.getoption("target")
    if target:
        return target
    processes: dict[str, ServiceProcess] = request.getfixturevalue("pipeline_processes")
    return processes["gateway"].target


@pytest.fixture(scope="session")
def http_server(http_repository: Path) -> Iterator[HttpServer]:
    """One process that serves them over HTTP, too."""
    with running_http_server(http_repository, "--default-models", "minilm,classifier") as server:
        yield server


@pytest.fixture(scope="session")
def ours(http_server: HttpServer) -> Iterator[Client]:
    """Our client of the same server, whose answers those of other clients are compared with."""
    with Client(http_server.process.target) as client:
        yield client


@pytest.fixture(scope="session")
def image() -> bytes:
    """A PNG file of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="session")
def writer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a template for chats in `source`, and as the model `writer` in `repository`."""
    from tests.models.decoders import make_writer

    return shared_folder(tmp_path_factory, "writer", make_writer)


@pytest.fixture(scope="session")
def writers_folder(writer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a model of each other task that generates."""
    from tests.models.writers import make_writers

    return shared_folder(tmp_path_factory, "writers", lambda folder: make_writers(folder, writer_folder))


@pytest.fixture
def slow_repository(fake_repository: Path, tmp_path: Path) -> Path:
    """One fake model whose every batch takes a second and a half."""
    return make_slow(fake_repository, tmp_path / "slow")


@pytest_asyncio.fixture(scope="session")
async def system(request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """The system under test."""
    if request.param == "local":
        async with local_system(request.getfixturevalue("repository")) as local:
            yield local
        return
    folder = request.config.getoption("target_tls")
    tls = TlsFiles(f"{folder}/tls.crt", f"{folder}/tls.key", f"{folder}/ca.crt") if folder else None
    async with AsyncClient(request.getfixturevalue(_TARGETS[request.param]), tls=tls) as client:
        yield client
