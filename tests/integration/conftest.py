"""The systems under test: local stages, four processes and one process, or the one that --target names."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import AsyncClient
from tests.integration.http_server import HttpServer, make_http_repository, running_http_server
from tests.integration.systems import System, local_system, make_slow
from tests.shared_folder import shared_folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    target = metafunc.config.getoption("target")
    if "system" in metafunc.fixturenames:
        metafunc.parametrize("system", ["target"] if target else ["local", "four processes", "one process"], indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("target"):
        reason = "--target is a system that stays as it is; this test starts and breaks one of its own"
        for item in items:
            if item.get_closest_marker("local_only"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def pipeline_processes(repository: Path) -> Iterator[dict[str, ServiceProcess]]:
    """The four services over the openvino bundles."""
    with four_processes(repository) as processes:
        yield processes


@pytest.fixture(scope="session")
def one_process(repository: Path) -> Iterator[ServiceProcess]:
    """The pipeline in one process behind gRPC, over the same bundles."""
    with ServiceProcess("all", "--repository", str(repository)) as process:
        yield process.wait_until_ready()


@pytest.fixture(scope="session")
def gateway_target(request: pytest.FixtureRequest) -> str:
    """HOST:PORT of a gateway that serves the test models."""
    target: str | None = request.config.getoption("target")
    if target:
        return target
    processes: dict[str, ServiceProcess] = request.getfixturevalue("pipeline_processes")
    return processes["gateway"].target


@pytest.fixture(scope="session")
def http_repository(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake models, and one of each task that they lack."""
    return shared_folder(tmp_path_factory, "http-repository", lambda folder: make_http_repository(folder, fake_repository))


@pytest.fixture(scope="session")
def http_server(http_repository: Path) -> Iterator[HttpServer]:
    """One process that serves them over HTTP, too."""
    with running_http_server(http_repository, "--http-default-models", "minilm,classifier") as server:
        yield server


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
    one_process: ServiceProcess | None = request.getfixturevalue("one_process") if request.param == "one process" else None
    async with AsyncClient(one_process.target if one_process else request.getfixturevalue("gateway_target")) as client:
        yield client
