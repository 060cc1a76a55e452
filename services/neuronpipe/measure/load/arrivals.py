"""Computes the send times of an open loop, and waits for them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

_CHUNK = 1024


def poisson_arrivals_s(rate_per_s: float, duration_s: float, seed: Sequence[int]) -> Iterator[float]:
    """The times of a Poisson process from 0 up to `duration_s`: gaps are independent and exponential.

    Processes with different seeds are independent, so several of them together are a Poisson process of the summed
    rate.
    """
    random = np.random.default_rng(seed)
    last_s = 0.0
    while last_s < duration_s:
        times_s = last_s + np.cumsum(random.exponential(1 / rate_per_s, _CHUNK))
        last_s = float(times_s[-1])
        yield from times_s[times_s < duration_s].tolist()


def pace(times_s: Iterator[float], send: Callable[[list[float]], None], stop: threading.Event) -> None:
    """Calls `send` at each of the times, on time.monotonic()'s clock, until there are no more or `stop` is set.

    Blocks: give it a thread. Event loops round their timers to milliseconds, asyncio's up and uvloop's to the nearest
    one, which sends early. Measured as the median delay from the time asked for to the send, 1,000/s, 2 cores:
    asyncio.sleep 0.6 ms, a thread that wakes the loop 0.1 ms. Latencies of 2 ms cannot afford the former.
    """
    due_s: list[float] = []
    for time_s in times_s:
        wait_s = time_s - time.monotonic()
        if wait_s > 0:
            if due_s:
                send(due_s)
                due_s = []
                wait_s = time_s - time.monotonic()
            if stop.wait(max(0.0, wait_s)):
                return
        due_s.append(time_s)
    if due_s and not stop.is_set():
        send(due_s)
