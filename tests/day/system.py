"""The processes of the day: stages with TLS, two gateways behind HAProxy, workers of jobs, and Redis with a replica.

Each process has addresses of its own, at which it is started again.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import psutil
import redis

from demo.processes import ServiceProcess
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.rpc.client import KEY_VARIABLE
from tests.servers.ports import free_port
from tests.servers.redis import RedisServer
from tests.servers.tls_files import STAGES, Deployment
from tests.suite.constants import constants

LEASE_S = 3.0
GATEWAYS, WORKERS = ("gateway-a", "gateway-b"), ("worker-a", "worker-b")
MEMBERS = (*STAGES, *GATEWAYS, *WORKERS)
_START_LIMIT_S, _END_LIMIT_S = 120.0, 60.0
RECEIVING_BYTES = 128 << 20
# Of connections, so that each reaches its limits often.
_TIMERS = {"max-connection-idle-s": 5, "max-connection-age-s": 10, "max-receiving-bytes": RECEIVING_BYTES}
_CONSTANTS = {"max_connection_age_grace_s": 60, "max_send_s": 5, "max_stream_idle_s": 20, "look_every_s": 0.3}
_SERVICE_NAME = "ours"
_TENANTS = """
[tenants.shop]
weight = 2

[tenants.search]

[tenants.greedy]
tokens_per_minute = 600

[tenants.workers]
acts_for_others = true
"""
TENANTS = ("shop", "search", "greedy", "workers")
_HAPROXY = """
global
  maxconn 4096
  stats socket $socket level admin
  tune.h2.max-concurrent-streams 1000
defaults
  mode http
  retries 5
  option redispatch
  retry-on conn-failure empty-response 503
  timeout connect 2s
  timeout client 300s
  timeout server 300s
  option httpchk GET /health
  default-server check inter 250ms fall 2 rise 1 port 1
frontend grpc
  bind 127.0.0.1:$grpc proto h2
  default_backend grpc
frontend http
  bind 127.0.0.1:$http
  default_backend http
backend grpc
  balance leastconn
  server a 127.0.0.1:$grpc_a proto h2 port $http_a check-proto h1
  server b 127.0.0.1:$grpc_b proto h2 port $http_b check-proto h1
backend http
  balance leastconn
  server a 127.0.0.1:$http_a port $http_a
  server b 127.0.0.1:$http_b port $http_b
"""


@dataclass
class Timeline:
    """What happened when, by time.monotonic(), and what is wrong. `kills`: when each began, and when it was over."""

    events: list[tuple[float, float, str]] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def event(self, text: str) -> AsyncIterator[None]:
        """Notes what happens in the block."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.events.append((began_s, time.monotonic(), text))


class Member:
    """A process of the system, whichever it is at the time.

    A stage has two addresses: its successor is ready at the other one before it ends. Others start again at their own.
    """

    def __init__(
        self, name: str, service: str, options: Sequence[str], environment: Mapping[str, str], timeline: Timeline
    ) -> None:
        self.name = name
        self.service = service
        self.ports = [free_port() for _ in range(2 if name in STAGES else 1)]
        self.http_port = free_port() if service == "gateway" else 0
        self.options = list(options)
        self.process: ServiceProcess | None = None
        # While a check may expect answers of it.
        self.is_steady = False
        self._environment = environment
        self._timeline = timeline
        self._port = self.ports[0]
        self.metrics = ""
        # Before it is replaced, and after it: a load balancer is told of both.
        self.leave: Callable[[], Awaitable[None]] = _do_nothing
        self.come_back: Callable[[], Awaitable[None]] = _do_nothing

    @property
    def address(self) -> str:
        """HOST:PORT of its gRPC port."""
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Starts it at its address."""
        process = self._started()
        await self._follow(process)

    def _started(self) -> ServiceProcess:
        http = ["--http-listen", f"127.0.0.1:{self.http_port}"] if self.http_port else []
        given = ("--listen", self.address, "--metrics-listen", "127.0.0.1:0", *http, *self.options)
        return ServiceProcess(self.service, *given, environment=self._environment)

    async def _follow(self, process: ServiceProcess) -> None:
        try:
            for event in ("ready", *(("all stages reached",) if self.service == "gateway" else ())):
                await asyncio.to_thread(process.wait_for, event, 1, _START_LIMIT_S)
        except BaseException:
            process.stop()
            raise
        self.process = process
        self.metrics = str(process.wait_for("metrics")["address"])
        self.is_steady = True

    async def kill(self) -> None:
        """Kills it, and starts another one, as an orchestrator does."""
        assert self.process
        self.is_steady = False
        began_s = time.monotonic()
        self.process.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait)
        if self.name not in WORKERS:
            self._timeline.kills.append((began_s, time.monotonic()))
        self._forget(self.process)
        await asyncio.sleep(1)
        await self.start()

    async def pause(self, seconds: float) -> None:
        """Stops it for a while, as a host does that has no CPU for it."""
        assert self.process
        self.is_steady = False
        self.process.signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.process.signal(signal.SIGCONT)
        await asyncio.sleep(1)
        self.is_steady = True

    async def replace(self) -> None:
        """Replaces it as a rolling update does."""
        before = self.process
        assert before
        self.is_steady = False
        if len(self.ports) > 1:
            self._port = next(port for port in self.ports if port != self._port)
            await self._follow(self._started())
            self.is_steady = False
        await self.leave()
        before.signal(signal.SIGTERM)
        try:
            if (code := await asyncio.to_thread(before.wait, _END_LIMIT_S)) != 0:
                self._timeline.faults[f"{self.name} ended with {code} after SIGTERM"] += 1
        except subprocess.TimeoutExpired:
            self._timeline.faults[f"{self.name} had not ended {_END_LIMIT_S:g} s after SIGTERM"] += 1
        self._forget(before)
        if len(self.ports) > 1:
            self.is_steady = True
        else:
            await self.start()
        await self.come_back()

    def stop(self) -> None:
        """Ends it."""
        self.is_steady = False
        if self.process:
            self.process.signal(signal.SIGTERM)
            try:
                if code := self.process.wait(_END_LIMIT_S):
                    self._timeline.faults[f"{self.name} ended with {code}"] += 1
            except subprocess.TimeoutExpired:
                self._timeline.faults[f"{self.name} had not ended {_END_LIMIT_S:g} s after SIGTERM at the end"] += 1
            self._forget(self.process)

    def _forget(self, process: ServiceProcess) -> None:
        for event in process.events():
            if event.get("level") == "error":
                told = str(event.get("exception", "")).strip().splitlines()
                self._timeline.faults[f"{self.name} logged: {event['event']} {told[-1] if told else ''}"] += 1
        if kept := os.environ.get("NEURONPIPE_DAY_LOGS"):
            Path(kept).mkdir(parents=True, exist_ok=True)
            with (Path(kept) / f"{self.name}.log").open("a") as log:
                log.writelines(json.dumps(event) + "\n" for event in process.events())
        process.stop()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, though nothing has happened to it."""
        return self.is_steady and self.process is not None and not psutil.pid_exists(self.process.pid)

    def rss_mib(self) -> float | None:
        """Its memory; none while it is started."""
        try:
            return float(psutil.Process(self.process.pid).memory_info().rss / (1 << 20)) if self.process else None
        except psutil.NoSuchProcess:
            return None


async def _do_nothing() -> None:
    """Of a process that no load balancer knows."""


class System:
    """All of it. `grpc`, `http`: the addresses of HAProxy, which callers use. `keys`: by tenant."""

    def __init__(self, repository: Path, folder: Path, timeline: Timeline) -> None:
        self.repository = repository
        self.timeline = timeline
        self.tls = Deployment(folder / "tls")
        keys = folder / "keys"
        self.keys = {tenant: create_key(keys, tenant, tenant) for tenant in TENANTS}
        self.guard = ["--api-keys", str(keys), "--tenants", str(folder / "tenants.toml")]
        (folder / "tenants.toml").write_text(_TENANTS)
        self._folder = folder
        self.grpc, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.redis = [RedisServer("--appendfsync", "always", is_durable=True) for _ in range(2)]
        self._cache = RedisServer()
        sentinel = folder / "sentinel.conf"
        sentinel.write_text(
            f"sentinel monitor {_SERVICE_NAME} 127.0.0.1 {self.redis[0].port} 1\n"
            f"sentinel down-after-milliseconds {_SERVICE_NAME} 60000\n"
        )
        self.sentinel = RedisServer.sentinel(sentinel)
        self.members = {name: self._member(name) for name in MEMBERS}
        self._connect_members()

    @property
    def jobs_url(self) -> str:
        """The Redis of jobs, by its sentinel."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{_SERVICE_NAME}/0"

    def master(self) -> RedisServer:
        """The Redis that has the jobs now."""
        _, port = self.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE_NAME)
        return next(server for server in self.redis if server.port == int(port))

    def _member(self, name: str) -> Member:
        service = name if name in STAGES else name.partition("-")[0]
        options = [f"--{timer}={value}" for timer, value in _TIMERS.items()]
        if service != "worker":
            options += ["--repository", str(self.repository)]
        environment = constants(self._environment(service), **_CONSTANTS)
        return Member(name, service, options, environment, self.timeline)

    def _environment(self, service: str) -> dict[str, str]:
        prefix = f"NEURONPIPE_{service.replace('-', '_').upper()}_"
        files = self.tls.files(service if service in STAGES else "gateway")
        if service == "worker":
            return {KEY_VARIABLE: self.keys["workers"]}
        if service == "gateway":
            return {
                f"{prefix}TLS_CA": str(files.ca),
                f"{prefix}STAGE_TLS_CERTIFICATE": str(files.certificate),
                f"{prefix}STAGE_TLS_KEY": str(files.key),
            }
        return {
            f"{prefix}TLS_CERTIFICATE": str(files.certificate),
            f"{prefix}TLS_KEY": str(files.key),
            f"{prefix}TLS_CLIENT_CA": str(files.ca),
            f"{prefix}ALLOWED_PEERS": "spiffe://tests/gateway",
        }

    def _connect_members(self) -> None:
        options = {"tokenizer": "tokenizer", "neuron-executor": "executor", "postprocessor": "postprocessor"}
        targets = [
            f"--{option}-target=" + ",".join(f"127.0.0.1:{port}" for port in self.members[stage].ports)
            for stage, option in options.items()
        ]
        for name, letter in zip(GATEWAYS, "ab", strict=True):
            self.members[name].leave = partial(self._set_state, letter, "drain")
            self.members[name].come_back = partial(self._set_state, letter, "ready")
            self.members[name].options += [
                *(*targets, *self.guard, "--open-services", "health,metrics", "--max-held-requests", "2000"),
                *("--jobs-redis-url", self.jobs_url, "--redis-url", self._cache.url, "--result-cache-models", "minilm"),
            ]
        self.members["tokenizer"].options += ["--redis-url", self._cache.url]
        for name in WORKERS:
            where = ("--jobs-redis-url", self.jobs_url, "--target", self.grpc, "--http-target", f"http://{self.http}")
            self.members[name].options += [*where, "--lease-s", str(LEASE_S), "--max-attempts", "20"]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of it is up in the block."""
        if not shutil.which("haproxy"):
            raise RuntimeError("haproxy is missing; `make day` installs it")
        with ExitStack() as stack:
            for server in (*self.redis, self._cache):
                stack.enter_context(server)
            self.redis[1].ask("REPLICAOF", "127.0.0.1", self.redis[0].port)
            stack.enter_context(self.sentinel)
            for member in self.members.values():
                stack.callback(member.stop)
            await self._start((*STAGES, *GATEWAYS))
            stack.enter_context(self._haproxy())
            await self._start(WORKERS)
            yield

    async def _start(self, names: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as starting:
            for name in names:
                starting.create_task(self.members[name].start())

    @contextmanager
    def _haproxy(self) -> Iterator[None]:
        ports = {"grpc": self.grpc, "http": self.http}
        values = {name: address.rpartition(":")[2] for name, address in ports.items()}
        for name, letter in zip(GATEWAYS, "ab", strict=True):
            values |= {f"grpc_{letter}": str(self.members[name].ports[0])}
            values |= {f"http_{letter}": str(self.members[name].http_port)}
        path = self._folder / "haproxy.cfg"
        values["socket"] = str(self._folder / "haproxy.sock")
        path.write_text(Template(_HAPROXY).substitute(values))
        with subprocess.Popen(["haproxy", "-q", "-db", "-f", str(path)]) as process:
            try:
                yield
            finally:
                process.terminate()

    async def _set_state(self, letter: str, state: str) -> None:
        """Has HAProxy send a gateway no more calls, or calls again. A moment later, those on their way are there."""
        for backend in ("grpc", "http"):
            _, writer = await asyncio.open_unix_connection(self._folder / "haproxy.sock")
            writer.write(f"set server {backend}/{letter} state {state}\n".encode())
            await writer.drain()
            writer.write_eof()
            writer.close()
        await asyncio.sleep(1)

    async def fail_over(self) -> None:
        """Has the replica take over, as a managed Redis does for maintenance: once it has all that was written, and
        while the one before takes no writes.
        """
        master = self.master()
        replica = next(server for server in self.redis if server is not master)
        while _replication(replica).get("master_link_status") != "up":
            await asyncio.sleep(0.1)
        master.ask("CLIENT", "PAUSE", 60_000, "WRITE")
        while _replication(replica).get("slave_repl_offset") != _replication(master)["master_repl_offset"]:
            await asyncio.sleep(0.02)
        self.sentinel.ask("SENTINEL", "FAILOVER", _SERVICE_NAME)
        while _replication(replica).get("role") != "master":
            await asyncio.sleep(0.1)
        # What the sentinel sends it waits for the end of the pause.
        master.ask("REPLICAOF", "127.0.0.1", replica.port)
        master.ask("CLIENT", "UNPAUSE")


def _replication(server: RedisServer) -> dict[str, Any]:
    client = redis.Redis.from_url(server.url)
    with contextlib.suppress(redis.ConnectionError):  # sentinels end the connections of a server that changes its role
        found: dict[str, Any] = client.info("replication")
        return found
    return {}
