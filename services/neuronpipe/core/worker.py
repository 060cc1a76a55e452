"""Where CPU work runs: in a thread of its own, unless going there would take longer than the work."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

# Handing work to a thread and its result back takes 0.1 ms (measured 2026-11-21, 2 virtual cores), as much as tokenizing 50 tokens, and
# 0.4 ms while the event loop is busy. Work on inputs of this size altogether is done in half a millisecond, for which the event loop can
# wait once in a pass.
_INLINE_BYTES = 4096


class Worker:
    """One thread, and turns on the event loop. Work in the thread is done one piece at a time."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        # What the thread has to do or is doing, also where nobody waits for it any more.
        self._in_thread: set[Future[Any]] = set()
        self._inline_bytes = 0
        self._turns: deque[tuple[asyncio.Future[None], int]] = deque()

    async def run(
        self, size_bytes: int, work: Callable[ParametersT, ResultT], *args: ParametersT.args, **kwargs: ParametersT.kwargs
    ) -> ResultT:
        """Does the work: on the event loop where its input is small and the thread has nothing to do, else in the thread.

        Much small work is spread over passes of the event loop. With the thread at work it waits its turn there, as a tokenizer's lock
        would make the event loop wait instead.
        """
        if size_bytes <= _INLINE_BYTES and not self._in_thread:
            if not self._inline_bytes:
                asyncio.get_running_loop().call_soon(self._begin_pass)
            if self._turns or self._inline_bytes + size_bytes > _INLINE_BYTES:
                await self._turn(size_bytes)
            else:
                self._inline_bytes += size_bytes
            if not self._in_thread:
                return work(*args, **kwargs)
        future = self._thread.submit(work, *args, **kwargs)
        self._in_thread.add(future)
        future.add_done_callback(self._in_thread.discard)
        return await asyncio.wrap_future(future)

    async def _turn(self, size_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns.append((turn, size_bytes))
        await turn

    def _begin_pass(self) -> None:
        self._inline_bytes = 0
        while self._turns and self._inline_bytes + self._turns[0][1] <= _INLINE_BYTES:
            turn, size_bytes = self._turns.popleft()
            if not turn.done():  # else its caller left
                turn.set_result(None)
                self._inline_bytes += size_bytes
        if self._inline_bytes:
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def close(self) -> None:
        """Waits for the work being done; what waits is cancelled."""
        self._thread.shutdown(wait=True, cancel_futures=True)
