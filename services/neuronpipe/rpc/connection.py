"""A client's connection, which follows the files of its certificates."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import grpc

from neuronpipe.core.watched import LOOK_EVERY_S
from neuronpipe.platform.tls import TlsFiles, WatchedTls, watched_tls
from neuronpipe.rpc.client import ServiceConfig, open_channel

StubsT = TypeVar("StubsT")

# gRPC's default: a server that is started by its first connection answers late, and the attempt must wait for it.
_CONNECT_MS = 20_000


class Connection(Generic[StubsT]):
    """A channel and its stubs. Where TLS files change, a new channel takes their place, since gRPC cannot change those
    of one; the old one ends with its last call.
    """

    def __init__(
        self,
        target: str,
        make_stubs: Callable[[grpc.aio.Channel], StubsT],
        service_config: ServiceConfig | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises SetupError for files that cannot be used."""
        self._target = target
        self._make_stubs = make_stubs
        self._service_config = service_config
        self._watched = watched_tls(tls, "client") if tls else None
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        # How many calls each channel has; the last one is that of new calls.
        self._calls: dict[grpc.aio.Channel, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    @contextmanager
    def use(self) -> Iterator[StubsT]:
        """The stubs for a call, which ends with the block."""
        if self._watched and time.monotonic() >= self._look_at_s:
            self._follow(self._watched)
        channel = self._channel
        self._calls[channel] += 1
        try:
            yield self._stubs
        finally:
            self._calls[channel] -= 1
            self._close_unused(channel)

    async def close(self) -> None:
        """Ends all calls."""
        await asyncio.gather(*self._closing, *(channel.close() for channel in self._calls))

    def _follow(self, watched: WatchedTls) -> None:
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        watched.look()
        if watched.value is not self._tls:
            old = self._channel
            self._open()
            self._close_unused(old)

    def _open(self) -> None:
        self._tls = self._watched.value if self._watched else None
        self._channel = open_channel(self._target, self._service_config, self._tls, connect_ms=_CONNECT_MS)
        self._stubs = self._make_stubs(self._channel)
        self._calls[self._channel] = 0

    def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._calls[channel]:
            del self._calls[channel]
            closing = asyncio.create_task(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
