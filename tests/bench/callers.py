"""Callers in a closed loop: the same ones for every system, in whatever environment its client runs. The standard
library is enough.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

AnswerT = TypeVar("AnswerT")

WARM_UP_S = 0.5
# After an error, or asking a server that refuses would take the time from those that it does not refuse.
PAUSE_S = 0.001


async def run_callers(
    call: Callable[[], Awaitable[AnswerT]], callers: int, seconds: float, expected_error: type[Exception]
) -> tuple[list[tuple[float, AnswerT]], int]:
    """Each caller asks again when it has its answer. Returns durations in seconds with the answers, and the number of
    errors.

    What ends in the warm-up or after the end does not count.
    """
    answered: list[tuple[float, AnswerT]] = []
    errors = 0
    began_s = time.perf_counter() + WARM_UP_S
    ends_s = began_s + seconds

    async def caller() -> None:
        nonlocal errors
        while (sent_s := time.perf_counter()) < ends_s:
            try:
                answer = await call()
            except expected_error:
                errors += began_s <= time.perf_counter() <= ends_s
                await asyncio.sleep(PAUSE_S)
                continue
            answered_s = time.perf_counter()
            if began_s <= answered_s <= ends_s:
                answered.append((answered_s - sent_s, answer))

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return answered, errors


def percentiles_ms(durations_s: Sequence[float]) -> tuple[float, float, float]:
    """The 50th, 90th and 99th of two durations or more."""
    cuts = statistics.quantiles([duration_s * 1e3 for duration_s in durations_s], n=100, method="inclusive")
    return cuts[49], cuts[89], cuts[98]
