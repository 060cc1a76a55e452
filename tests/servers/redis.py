"""A real redis-server on a free port, and a proxy before it that does to connections what networks do."""

import asyncio
import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import redis

from tests.servers.ports import free_port

_START_LIMIT_S = 10


class RedisServer:
    """A redis-server of its own, empty and without files. `options`: options of its command line.

    `is_durable`: it has a file, with which it can be started again. `tls`: a folder with tls.crt, tls.key and ca.crt;
    then it takes TLS only, from clients with a certificate.
    """

    def __init__(
        self, *options: str, is_sentinel: bool = False, is_durable: bool = False, tls: Path | None = None
    ) -> None:
        if not shutil.which("redis-server"):
            raise RuntimeError("redis-server is missing; `make setup` installs it")
        self.port = free_port()
        self._options = options
        self._tls = tls
        self._is_durable = is_durable
        self._is_sentinel = is_sentinel
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def sentinel(cls, configuration: Path, tls: Path | None = None) -> "RedisServer":
        """Makes a sentinel with a configuration file, which it writes to."""
        return cls(str(configuration), is_sentinel=True, tls=tls)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"rediss://127.0.0.1:{self.port}/0?{self.tls_query}" if self._tls else f"redis://127.0.0.1:{self.port}/0"

    @property
    def tls_query(self) -> str:
        """The part of a URL behind the question mark, for a server with TLS."""
        return f"ssl_ca_certs={self._tls}/ca.crt&ssl_certfile={self._tls}/tls.crt&ssl_keyfile={self._tls}/tls.key"

    def ask(self, *words: str | int | bytes) -> Any:
        """Returns the server's reply to a command."""
        return redis.Redis.from_url(self.url).execute_command(*words)  # type: ignore[no-untyped-call]

    def stored_keys(self) -> list[bytes]:
        """Returns the names of all keys."""
        return list(self.ask("KEYS", "*"))

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self._folder = self._folder or tempfile.TemporaryDirectory()
        port = ["--tls-port" if self._tls else "--port", str(self.port)]
        if self._tls:
            files = {"cert": "tls.crt", "key": "tls.key", "ca-cert": "ca.crt"}
            port += [word for kind, file in files.items() for word in (f"--tls-{kind}-file", str(self._tls / file))]
            port += ["--port", "0", "--tls-cluster", "yes", "--tls-replication", "yes"]
        address = [*port, "--bind", "127.0.0.1", "--dir", self._folder.name]
        kind = (
            ["--sentinel"] if self._is_sentinel else ["--save", "", "--appendonly", "yes" if self._is_durable else "no"]
        )
        # A configuration file comes first.
        self._process = subprocess.Popen(["redis-server", *self._options, *address, *kind], stdout=subprocess.DEVNULL)
        give_up_s = time.monotonic() + _START_LIMIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if time.monotonic() > give_up_s or self._process.poll() is not None:
                raise RuntimeError("redis-server does not start")
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self._process
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it at once."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._folder:
            self._folder.cleanup()


@contextmanager
def redis_server(*options: str, is_durable: bool = False, tls: Path | None = None) -> Iterator[RedisServer]:
    """Runs a server for the time of a block."""
    with RedisServer(*options, is_durable=is_durable, tls=tls) as server:
        yield server


class Proxy:
    """A proxy between a client and Redis. A test can change at any time how the proxy treats answers."""

    def __init__(self, port: int) -> None:
        self._redis_port = port
        self.port = 0
        self.delay_s = 0.0
        self.is_open = True
        self.is_cutting = False
        self.cuts_from_bytes = 0
        self.is_corrupting = False
        self.is_babbling = False
        self.says = b""
        self.connections = 0
        self.requests = 0
        self._chance = random.Random(11)
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The address of the proxy, in the form of an address of Redis."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            if not self.is_open:
                raise ConnectionRefusedError
            redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._redis_port)
            self._writers.add(redis_writer)
            await asyncio.gather(self._requests(reader, redis_writer), self._answers(redis_reader, writer))
        writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.requests += 1
            writer.write(data)
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.is_cutting and len(data) >= self.cuts_from_bytes:
                writer.write(data[: len(data) // 2])
                break
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            writer.write(self._spoil(data))
        writer.close()

    def _spoil(self, data: bytes) -> bytes:
        if self.says:
            return self.says
        if self.is_babbling:
            return self._chance.randbytes(len(data)) + b"\r\n"
        if self.is_corrupting:
            spoiled = bytearray(data)
            for _ in range(1 + len(data) // 50):
                spoiled[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
            return bytes(spoiled)
        return data

    def close(self) -> None:
        """Cuts all connections."""
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    """Runs a proxy before the Redis on a port, for the time of a block."""
    between = Proxy(port)
    server = await asyncio.start_server(between.handle, "127.0.0.1", 0)
    between.port = server.sockets[0].getsockname()[1]
    try:
        yield between
    finally:
        between.close()
        server.close()
