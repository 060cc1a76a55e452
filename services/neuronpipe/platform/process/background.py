"""Background tasks: tasks beside a block of code, tasks whose results are awaited together, and tasks that run a few at
a time, in turns.

Calls that may hang run in threads of their own.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

from neuronpipe.platform.process.group_queue import GroupQueue

ResultT = TypeVar("ResultT")
ParametersT = ParamSpec("ParametersT")


@asynccontextmanager
async def run_beside(
    *coroutines: Coroutine[Any, Any, None],
) -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs coroutines beside the block, which gets a function that starts more of them.

    If a coroutine crashes, the block is cancelled, and the coroutine's error is raised instead of the block's result.
    The block's own error is raised as it is. A bare TaskGroup would wrap it in an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            try:
                yield lambda coroutine: tasks.append(group.create_task(coroutine))
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


async def run_together(
    coroutines: Iterable[Coroutine[Any, Any, ResultT]], wait_for_turn: Callable[[], Awaitable[None]] | None = None
) -> list[ResultT]:
    """Runs coroutines side by side and returns their results in order. The first error ends the others, and is raised.

    `wait_for_turn`: awaited before each coroutine is made.

    There is no TaskGroup: until Python 3.13 a cancelled TaskGroup keeps itself in a reference cycle. To collect the
    groups of hundreds of batches whose caller has left would take 100 ms, in which all calls wait.
    """
    tasks: list[asyncio.Task[ResultT]] = []
    making, coroutine = iter(coroutines), None
    try:
        while True:
            if wait_for_turn:
                await wait_for_turn()
            if (coroutine := next(making, None)) is None:
                break
            tasks.append(asyncio.create_task(coroutine))
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)
        del tasks, coroutine  # an error's traceback keeps this frame


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks that still run, and waits for them."""
    running = [task for task in tasks if not task.done() and task.cancel()]
    if running:
        await asyncio.wait(running)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the error was never retrieved


async def wait_for_event(event: asyncio.Event, limit_s: float) -> bool:
    """Waits until an event is set, for `limit_s` seconds at most. Returns whether it is set."""
    with suppress(TimeoutError):
        # wait_for swallows in Python 3.11 a cancellation that comes together with the event.
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


def start_apart(function: Callable[[], ResultT]) -> "Future[ResultT]":
    """Calls a function, which may hang, in a thread of its own."""
    future: Future[ResultT] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), daemon=True).start()
    return future


async def run_apart(
    function: Callable[ParametersT, ResultT], *args: ParametersT.args, **kwargs: ParametersT.kwargs
) -> ResultT:
    """Calls a function in a thread of its own: a function that hangs blocks neither other calls nor the end of the
    process.
    """
    return await asyncio.wrap_future(start_apart(partial(function, *args, **kwargs)))


class Places:
    """Limits how many callers run at once. Groups of waiting callers, such as tenants, get places in turns.

    docs/overload.md ("Where a request waits") has all places where tenants share; the next is admission control.

    asyncio.Semaphore would search all waiting callers when one leaves: under overload, there are thousands.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: GroupQueue[asyncio.Future[None]] = GroupQueue()

    async def take(self, group: str = "") -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(group, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Passes a place on to the next waiting caller."""
        while self._waiting:
            if not (turn := self._waiting.take()).done():
                turn.set_result(None)
                return
        self._free += 1

    def leave_after(self, turns: int) -> None:
        """Passes a place on after `turns` turns of the event loop."""
        leave = partial(self.leave_after, turns - 1) if turns > 1 else self.leave
        asyncio.get_running_loop().call_soon(leave)

    @asynccontextmanager
    async def taken(self, group: str) -> AsyncIterator[None]:
        await self.take(group)
        try:
            yield
        finally:
            self.leave()
