"""What a process says of its health, for doors to show in their own way."""

import asyncio
from collections.abc import AsyncIterator, Iterable


class HealthBoard:
    """The health of named services, and under "" of the process as a whole.

    A service is serving from the moment that the process is open until it drains, but for the time that `set` has said otherwise.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._reports = dict.fromkeys(["", *services], True)
        self._is_open = False
        self._is_ended = False
        self._changed = asyncio.Event()

    def is_serving(self, service: str) -> bool | None:
        """Whether calls of a service make sense now; None for one that the process does not have."""
        report = self._reports.get(service)
        return report and self._is_open

    def set(self, service: str, is_serving: bool) -> None:
        """What the parts of the process report of a service."""
        self._reports[service] = is_serving
        self._notify()

    async def watch(self, service: str) -> AsyncIterator[bool | None]:
        """A service's health as it is, and then after every change; ends when the process does."""
        last: object = self
        while True:
            changed, now = self._changed, self.is_serving(service)
            if now != last:
                last = now
                yield now
            elif self._is_ended:
                return
            else:
                await changed.wait()

    def open(self) -> None:
        """The process takes calls from now on."""
        self._is_open = True
        self._notify()

    def drain(self) -> None:
        """Nothing is serving any more, whatever is reported."""
        self._is_open = False
        self._notify()

    def end_watches(self) -> None:
        """Ends every watch."""
        self._is_ended = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
