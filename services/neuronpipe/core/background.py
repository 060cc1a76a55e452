"""Tasks that run beside a block of code and end with it, side by side to their results, or a few at once in turns."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


@asynccontextmanager
async def run_beside(
    *coroutines: Coroutine[Any, Any, None],
) -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs coroutines beside the block, which gets a function that starts more of them.

    If a coroutine crashes, the block is cancelled, and the coroutine's error is raised in place of the block's result.

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


async def run_together(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """The results of all, in their order. The first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Places:
    """Places for a few at once. Groups that wait, such as tenants, get them in turns.

    asyncio.Semaphore would search all that wait when one leaves: under overload, these are thousands.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the group whose turn is next is the first

    async def take(self, group: str = "") -> None:
        """Waits for a place."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Passes a place on."""
        while self._waiting:
            group, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            del self._waiting[group]
            if turns:
                self._waiting[group] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    @asynccontextmanager
    async def taken(self, group: str) -> AsyncIterator[None]:
        """A place for as long as the block runs."""
        await self.take(group)
        try:
            yield
        finally:
            self.leave()
