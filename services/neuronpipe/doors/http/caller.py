"""The caller's end of a connection, while one request is answered."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from neuronpipe.doors.http.problems import RequestRefused

Receive: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]

# Most responses are ready before this time, and watching the connection takes a task.
_WATCHED_AFTER_S = 0.01


class RequestCaller:
    """The caller of a request. `connection`: its name. `has_sent_all`: whether the body was read to its end."""

    def __init__(self, receive: Receive, connection: str) -> None:
        self.connection = connection
        self.has_left = False
        self.has_sent_all = False
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def read(self, max_bytes: int, setting: str, has_come: Callable[[int], None]) -> bytes:
        """Returns the body, which the setting of this name limits.

        `has_come`: gets the number of bytes that have come, while more bytes are to come. Raises RequestRefused for a
        larger body, and CancelledError if the caller disconnects.
        """
        parts, size_bytes = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.has_left = True
                raise asyncio.CancelledError
            parts.append(message["body"])
            size_bytes += len(message["body"])
            if size_bytes > max_bytes:
                raise too_large(max_bytes, setting)
            if not message["more_body"]:
                self.has_sent_all = True
                return parts[0] if len(parts) == 1 else b"".join(parts)
            has_come(size_bytes)

    def watch(self) -> None:
        """Cancels the running task if the caller disconnects, from now on until `forget`."""
        task = asyncio.current_task()
        assert task  # noqa: S101
        self._timer = asyncio.get_running_loop().call_later(_WATCHED_AFTER_S, self._start_watching, task)

    def forget(self) -> None:
        """Ends the watch."""
        if self._timer:
            self._timer.cancel()
        if self._watcher:
            self._watcher.cancel()
            self._watcher = None  # the watcher refers to this caller

    def _start_watching(self, task: "asyncio.Task[Any]") -> None:
        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.has_left = True
            task.cancel()

        self._watcher = asyncio.create_task(wait())


def too_large(max_bytes: int, setting: str) -> RequestRefused:
    """Returns the error for a body that is larger than a setting of the gateway allows."""
    problem = f"the body is larger than {max_bytes} bytes, the limit (the gateway's {setting})"
    return RequestRefused(413, "content_too_large", problem)
