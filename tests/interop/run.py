"""Runs a case: a server, a client that is given the case, and what must have come of it."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import psutil

from demo.processes import ServiceProcess
from tests.interop.cases import Case, Ended
from tests.interop.echo_server import SERVICE
from tests.interop.proxies import PROXIES
from tests.servers.tls_files import Deployment
from tests.suite.waiting import until

PLAIN, TLS, MTLS = SECURITIES = ("plain", "TLS", "mTLS")
_LIMIT_S = 120.0
_FOLDER = Path(__file__).parent / "clients"
# Not all that Debian has: of slf4j it has several, which warn of each other.
_NETTY = ("buffer", "codec", "codec-http", "codec-http2", "codec-socks", "common", "handler", "handler-proxy")
_JARS = [
    f"/usr/share/java/{name}.jar"
    for name in (
        *("grpc-api", "grpc-core", "grpc-context", "grpc-netty", "guava", "gson", "perfmark-api", "netty-tcnative"),
        *(f"netty-{name}" for name in (*_NETTY, "resolver", "transport", "transport-native-unix-common")),
    )
]
_NODE_MODULES = Path("tests/integration/node/node_modules").absolute()
_BUILT = Path(".cache/interop").absolute()
_CAN_ALL = frozenset({"cancel", "gzip", "slow reader", "at once", "keepalive"})


@dataclass(frozen=True, slots=True)
class Client:
    """`command`: of the program. `can`: see Case.needs. `wants`: the program that must be there for it, besides what
    `make setup` installs.
    """

    name: str
    command: tuple[str, ...]
    can: frozenset[str] = _CAN_ALL
    wants: str = ""
    securities: tuple[str, ...] = SECURITIES
    # What it is for; a client of everything is there for all cases that it can.
    only: frozenset[str] = frozenset()
    # The name of the proxy through which it calls.
    proxy: str = ""

    def runs(self, case: Case, security: str) -> bool:
        """Whether the case is for this client."""
        return (
            case.needs <= self.can
            and self.only <= case.needs
            and security in self.securities
            and (security == PLAIN or not case.plain_only)
        )

    @property
    def is_there(self) -> bool:
        """Whether what it needs is installed."""
        return not self.wants or shutil.which(self.wants) is not None or Path(self.wants).exists()


def _python(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"tests.interop.clients.{module}")


_CLASS_PATH = ":".join([str(_BUILT / "grpc-java"), *_JARS])
_JAVA = ("java", f"-Djava.library.path={_BUILT / 'jni'}", "-cp", _CLASS_PATH, "Client")
CLIENTS = (
    Client("grpcio", _python("grpcio_sync")),
    Client("grpcio aio", _python("grpcio_aio")),
    Client("frames", _python("raw"), frozenset({"raw"}), securities=(PLAIN,), only=frozenset({"raw"})),
    Client("grpc-js", ("env", f"NODE_PATH={_NODE_MODULES}", "node", f"{_FOLDER}/grpc_js/client.js")),
    Client("grpc-go", (str(_BUILT / "grpc-go"),), wants=str(_BUILT / "grpc-go")),
    Client("grpc-java", _JAVA, wants=str(_BUILT / "grpc-java" / "Client.class")),
    Client("curl", _python("curl"), frozenset({"raw"}), "curl"),
    *(
        Client(f"grpcio, {name}", _python("grpcio_sync"), wants=proxy.command[0], securities=(PLAIN,), proxy=name)
        for name, proxy in PROXIES.items()
    ),
)


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test. `tls`: the files that a client needs."""

    process: ServiceProcess
    tls: Mapping[str, Path] | None

    def seen(self) -> dict[str, int]:
        """What the echo server says of its calls."""
        with self.channel() as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/Seen")
            seen: dict[str, int] = json.loads(call(b"", timeout=_LIMIT_S))
            return seen

    def channel(self) -> grpc.Channel:
        """A channel of the test's own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if not self.tls:
            return grpc.insecure_channel(self.process.target, options)
        files = {name: path.read_bytes() for name, path in self.tls.items()}
        shown = grpc.ssl_channel_credentials(files["ca"], files.get("key"), files.get("certificate"))
        return grpc.secure_channel(self.process.target, shown, options)

    def rss_mib(self) -> float:
        """Its memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss / (1 << 20))

    def cpu_s(self) -> float:
        """The CPU time that it has taken so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Tls:
    """`options`: of a server. `files`: of a client; None without TLS."""

    options: tuple[str, ...] = ()
    files: Mapping[str, Path] | None = None


def make_tls(security: str, folder: Path) -> Tls:
    """New certificates."""
    if security == PLAIN:
        return Tls()
    deployment = Deployment(folder)
    own, callers = deployment.files("all"), deployment.files("caller")
    options = ("--tls-certificate", str(own.certificate), "--tls-key", str(own.key))
    given = {"ca": callers.ca, "certificate": callers.certificate, "key": callers.key}
    files = {name: Path(path) for name, path in given.items() if path}
    if security == TLS:
        return Tls(options, {"ca": files["ca"]})
    return Tls((*options, "--tls-client-ca", str(own.ca)), files)


@contextmanager
def running_echo(tls: Tls = Tls(), *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """The echo server."""
    command = ("tests.interop.echo_server",)
    with ServiceProcess("echo", *tls.options, *options, environment=environment, command=command) as process:
        yield Server(process.wait_until_ready(), tls.files)


@contextmanager
def running_gateway(repository: Path, tls: Tls = Tls()) -> Iterator[Server]:
    """`serve all` over the models of a repository."""
    with ServiceProcess("all", "--repository", str(repository), *tls.options) as process:
        yield Server(process.wait_until_ready(), tls.files)


class ClientProcess:
    """A client's program, which is given one case after the other."""

    def __init__(self, client: Client) -> None:
        self._process = subprocess.Popen(
            client.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stdin
        assert self._process.stdout
        self._to: IO[str] = self._process.stdin
        self._from: IO[str] = self._process.stdout

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(self, *raised: object) -> None:
        with suppress(BrokenPipeError):  # it has crashed
            self._to.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()

    @property
    def has_ended(self) -> bool:
        """Whether it has crashed, or was ended for taking too long."""
        return self._process.poll() is not None

    def begin(self, case: Case, target: str, tls: Mapping[str, Path] | None) -> None:
        """Lets it run a case."""
        self._to.write(case.as_json(target, tls) + "\n")
        self._to.flush()

    def end(self) -> list[Ended]:
        """What came of the case. Raises AssertionError where the client says nothing."""
        timer = threading.Timer(_LIMIT_S, self._process.kill)
        timer.start()
        try:
            line = self._from.readline()
        finally:
            timer.cancel()
        assert line, f"the client crashed, or took more than {_LIMIT_S:g} s"
        outcome = json.loads(line)
        assert "outcomes" in outcome, outcome
        return [Ended.of(call) for call in outcome["outcomes"]]


def run_case(case: Case, server: Server, client: ClientProcess, target: str) -> None:
    """Runs a case. Raises AssertionError where something else comes of it. `target`: the server, or a proxy."""
    before = server.seen() if case.seen else {}
    with growth(server) as peak_mib:
        client.begin(case, target, server.tls)
        ended = client.end()
    for check, call in zip(case.checks, ended, strict=True):
        check(call)
    if case.seen:
        until(lambda: _grown(before, server.seen(), case.seen))
    if case.max_growth_mib:
        assert peak_mib[0] < case.max_growth_mib, peak_mib


def _grown(before: Mapping[str, int], now: Mapping[str, int], by: Mapping[str, int]) -> bool:
    return all(now.get(name, 0) - before.get(name, 0) == growth for name, growth in by.items())


@contextmanager
def growth(server: Server) -> Iterator[list[float]]:
    """By how many MiB the server's memory grows at most while the block runs: the list's only item."""
    before, peak, is_over = server.rss_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            peak[0] = max(peak[0], server.rss_mib() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def cases_of(client: Client, security: str, cases: Sequence[Case]) -> list[Case]:
    """Those that are for a client."""
    return [case for case in cases if client.runs(case, security)]
