"""The calls in flight of one server: counted, bounded, and refused once the server drains."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from neuronpipe.core.errors import Overloaded, Unavailable

# Backstop behind the admission of the gateway and the queues of the executor: calls in one process, of all services.
_MAX_CALLS = 4096


class Calls:
    """Counts the calls of a server, so that it can wait for them."""

    def __init__(self, service: str) -> None:
        self.count = 0
        self._service = service
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._reads: set[asyncio.Timeout] = set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts a call in and out. Raises Unavailable while draining, and Overloaded."""
        if self._is_draining:
            raise self._stopping()
        if self.count >= _MAX_CALLS:
            raise Overloaded(f"{self.count} calls in flight, the {self._service} service takes {_MAX_CALLS}", retry_after_s=1)
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def read(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """A caller's stream until the caller ends it. Raises Unavailable as soon as the server drains: nothing new is begun then."""
        while not self._is_draining:
            try:
                async with asyncio.timeout(None) as timer:
                    self._reads.add(timer)
                    try:
                        message = await anext(messages)
                    finally:
                        self._reads.discard(timer)
            except StopAsyncIteration:
                return
            except TimeoutError:  # drain made the timer expire
                break
            yield message
        raise self._stopping()

    async def drain(self, grace_s: float) -> None:
        """Refuses what is new and waits for what is in flight, `grace_s` at most."""
        self._is_draining = True
        for timer in self._reads:
            timer.reschedule(asyncio.get_running_loop().time())
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return

    def _stopping(self) -> Unavailable:
        return Unavailable(f"the {self._service} service is stopping")
