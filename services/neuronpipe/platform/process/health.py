"""The health of a process and of its services. Each door reports it in its own protocol."""

import asyncio
from collections.abc import AsyncIterator, Iterable


class HealthBoard:
    """The health of named services, and of the whole process under "".

    A service is serving from when the process opens until it drains, except while `set` says otherwise.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._reports = dict.fromkeys(["", *services], True)
        self._is_open = False
        self._is_ended = False
        self._changed = asyncio.Event()

    def is_serving(self, service: str) -> bool | None:
        """Returns whether a service can be called now; None for an unknown service."""
        report = self._reports.get(service)
        return report and self._is_open

    @property
    def is_well(self) -> bool:
        """Whether the process works, also while it starts or drains. Otherwise it should be replaced."""
        return self._reports[""]

    def set(self, service: str, is_serving: bool) -> None:
        self._reports[service] = is_serving
        self._notify()

    async def wait_until_reported(self, service: str) -> None:
        """Returns when a service would be serving if the process were open."""
        while not self._reports[service]:
            await self._changed.wait()

    async def watch(self, service: str) -> AsyncIterator[bool | None]:
        """Yields a service's health now, and then after every change. Ends when the process ends."""
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
        """Reports the process as serving from now on."""
        self._is_open = True
        self._notify()

    def drain(self) -> None:
        """Reports everything as not serving from now on."""
        self._is_open = False
        self._notify()

    def end_watches(self) -> None:
        self._is_ended = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
