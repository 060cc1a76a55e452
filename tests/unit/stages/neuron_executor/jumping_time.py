"""An event loop whose time jumps where it would wait, so that minutes are simulated in moments."""

import asyncio
import selectors


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Also stands in for the module `time`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    monotonic = time

    def monotonic_ns(self) -> int:
        return int(self.time() * 1e9)
