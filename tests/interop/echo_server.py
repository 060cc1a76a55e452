"""A service without a pipeline behind the door of all services: what arrives, comes back.

Run: python -m tests.interop.echo_server [--SETTING VALUE ...]   The log says where it listens; SIGTERM ends it.
"""

import asyncio
import base64
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, ClassVar

from neuronpipe.cli.serve import run_service
from neuronpipe.core import errors
from neuronpipe.core.logs import start_logging
from neuronpipe.core.metrics import Telemetry, all_may_read
from neuronpipe.core.settings import read_settings
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.process.settings import ServiceSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.rpcs import Rpc, RpcHandlers
from neuronpipe.rpc.transport import ServerCall

_MAX_NUMBER = 64 << 20
SERVICE = "neuronpipe.tests.Echo"
# method → whether the client streams, whether the server does. Messages are bytes; what a method is told, and its
# account, are JSON.
METHODS = {
    "Echo": (False, False),
    "Split": (False, True),
    "Join": (True, False),
    "Chat": (True, True),
    "Fail": (False, False),
    "Falter": (False, True),
    "Early": (True, False),
    "Slow": (False, False),
    "Metadata": (False, False),
    "Seen": (False, False),
}


class EchoSettings(ServiceSettings):
    """`shares_port`: other processes listen on it, too."""

    prefix: ClassVar[str] = "NEURONPIPE_ECHO_"
    shares_port: bool = False


class Echo:
    """The methods. `_seen`: how many calls of Slow and Split were answered, and how many were cancelled before."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    async def echo(self, request: bytes, call: ServerCall) -> bytes:
        """The request."""
        self._seen["echoed"] += 1
        return request

    async def split(self, request: bytes, call: ServerCall) -> AsyncIterator[bytes]:
        """As many messages as it is told, of so many bytes, with a pause before each but the first."""
        told = _told(request, "count", "size")
        with self._seeing("split"):
            for number in range(int(told["count"])):
                if number and told.get("pause_s"):
                    await asyncio.sleep(told["pause_s"])
                yield pattern(int(told["size"]))

    async def join(self, requests: AsyncIterator[bytes], call: ServerCall) -> bytes:
        """The number of messages, their bytes, and the checksum over all of them."""
        count = size = checksum = 0
        async for request in requests:
            count, size, checksum = count + 1, size + len(request), zlib.crc32(request, checksum)
        return json.dumps({"count": count, "size": size, "crc32": checksum}).encode()

    async def chat(self, requests: AsyncIterator[bytes], call: ServerCall) -> AsyncIterator[bytes]:
        """Each message as soon as it arrives."""
        async for request in requests:
            yield request

    async def fail(self, request: bytes, call: ServerCall) -> bytes:
        """Ends with the error of a class's name and its arguments."""
        raise _error(request)

    async def falter(self, request: bytes, call: ServerCall) -> AsyncIterator[bytes]:
        """The same after two messages."""
        yield b"one"
        yield b"two"
        raise _error(request)

    async def early(self, requests: AsyncIterator[bytes], call: ServerCall) -> bytes:
        """The first message, while others may still come."""
        async for request in requests:
            return request
        raise errors.InvalidInput("request", "is missing")

    async def slow(self, request: bytes, call: ServerCall) -> bytes:
        """The request, after some seconds."""
        told = _told(request, "seconds")
        with self._seeing("slow"):
            await asyncio.sleep(told["seconds"])
        return request

    async def metadata(self, request: bytes, call: ServerCall) -> bytes:
        """The call's metadata: pairs, binary values in Base64."""
        pairs = [
            (key, base64.b64encode(value).decode() if isinstance(value, bytes) else value)
            for key, value in call.metadata
        ]
        return json.dumps(pairs).encode()

    async def seen(self, request: bytes, call: ServerCall) -> bytes:
        """What came of calls so far, and which process this is."""
        return json.dumps(self._seen | {"pid": os.getpid()}).encode()

    @contextmanager
    def _seeing(self, name: str) -> Iterator[None]:
        """Counts a block as begun, and then as answered or cancelled."""
        self._seen[f"{name} begun"] += 1
        try:
            yield
        except BaseException:
            self._seen[f"{name} cancelled"] += 1
            raise
        self._seen[f"{name} answered"] += 1

    def handlers(self) -> RpcHandlers:
        """Every method, with bytes as messages."""
        return [(rpc, getattr(self, rpc.path.rpartition("/")[2].lower())) for rpc in _rpcs()]


def pattern(size: int) -> bytes:
    """The bytes that every client and this server mean by a size: 0 to 250, repeated."""
    period = bytes(range(251))
    return (period * (size // len(period) + 1))[:size]


def _rpcs() -> Sequence[Rpc]:
    return [
        Rpc(f"/{SERVICE}/{name}", "bytes", bytes, bytes, client_streaming=of_client, server_streaming=of_server)
        for name, (of_client, of_server) in METHODS.items()
    ]


def _told(request: bytes, *needed: str) -> dict[str, float]:
    """The JSON of a request: numbers, at least these. Raises InvalidInput."""
    try:
        told = json.loads(request)
    except ValueError as error:
        raise errors.InvalidInput("request", "is no JSON") from error
    if not (isinstance(told, dict) and told.keys() >= set(needed)):
        raise errors.InvalidInput("request", f"needs {', '.join(needed)}")
    if not all(isinstance(value, int | float) and 0 <= value <= _MAX_NUMBER for value in told.values()):
        raise errors.InvalidInput("request", f"needs numbers from 0 to {_MAX_NUMBER}")
    return told


def _error(request: bytes) -> Exception:
    """Of the name and the arguments in a request."""
    try:
        told = json.loads(request)
        error: Any = getattr(errors, told["error"])
        raised: Exception = error(*told["arguments"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.InvalidInput("request", "names no error") from error
    return raised


async def _run(settings: EchoSettings, telemetry: Telemetry, tls: ServerTls | None) -> None:
    door = GrpcDoor(settings.process, [SERVICE], tls, shares_port=settings.shares_port)

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        yield partial(door.open, Echo().handlers())

    with telemetry.metrics_port(all_may_read):
        await serve("echo", settings.process, [door], assemble, telemetry.meters)


def main(arguments: Sequence[str]) -> None:
    """Serves until SIGTERM."""
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(*[iter(arguments)] * 2, strict=True)
    }
    settings = read_settings(EchoSettings, given)
    start_logging("echo")
    run_service("echo", settings, lambda telemetry, tls: _run(settings, telemetry, tls), os.environ)


if __name__ == "__main__":
    main(sys.argv[1:])
