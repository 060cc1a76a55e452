"""A time that stands still until the test moves it."""


class FixedClock:
    """Stands in for functions that tell the time, and for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    monotonic = __call__

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)
