"""Tasks that run beside a block of code and end with it, or side by side to their results."""

import asyncio
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
