"""Servers and clients' programs, started once a run, and what came of each case."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.proxies import PROXIES, running_proxy
from tests.interop.results import Result, write
from tests.interop.run import Client, ClientProcess, Server, make_tls, running_echo, running_gateway

_RESULTS = pytest.StashKey[list[Result]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("interop")
    group.addoption(
        "--every-client", action="store_true", help="fail, instead of leaving it out, where a client is not installed"
    )
    group.addoption("--interop-results", type=Path, metavar="FILE", help="write what came of each case to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the clients that are not installed."""
    if config.getoption("every_client"):
        return
    missing = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and isinstance(client := getattr(item, "callspec", None) and item.callspec.params.get("client"), Client)
        and not client.is_there
    ]
    if missing:
        config.hook.pytest_deselected(items=missing)
        left_out = set(missing)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    path, results = session.config.getoption("interop_results"), session.config.stash[_RESULTS]
    if path and results:
        write(path, results)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> list[Result]:
    """What came of the cases so far."""
    return request.config.stash[_RESULTS]


class Started:
    """Servers and clients, each started when it is first asked for."""

    def __init__(self, stack: ExitStack, request: pytest.FixtureRequest, folder: Path) -> None:
        self._stack = stack
        self._request = request
        self._folder = folder
        self._servers: dict[tuple[str, str], Server] = {}
        self._clients: dict[Client, ClientProcess] = {}
        self._proxies: dict[tuple[str, str], str] = {}

    def server(self, kind: str, security: str) -> Server:
        """A server: "echo" or "gateway"."""
        key = (kind, security)
        if key not in self._servers:
            tls = make_tls(security, self._folder / "-".join(key))
            running = (
                running_echo(tls)
                if kind == "echo"
                else running_gateway(self._request.getfixturevalue("fake_repository"), tls)
            )
            self._servers[key] = self._stack.enter_context(running)
        return self._servers[key]

    def client(self, client: Client) -> ClientProcess:
        """A client's program."""
        if client not in self._clients or self._clients[client].has_ended:
            self._clients[client] = self._stack.enter_context(ClientProcess(client))
        return self._clients[client]

    def target(self, client: Client, server: Server) -> str:
        """Where a client calls: the server, or the proxy before it."""
        address = server.process.target
        if not client.proxy:
            return address
        key = (client.proxy, address)
        if key not in self._proxies:
            folder = self._folder / f"{client.proxy}-{address.rpartition(':')[2]}"
            running = running_proxy(PROXIES[client.proxy], address, folder)
            self._proxies[key] = self._stack.enter_context(running)
        return self._proxies[key]


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with ExitStack() as stack:
        yield Started(stack, request, tmp_path_factory.mktemp("interop"))
