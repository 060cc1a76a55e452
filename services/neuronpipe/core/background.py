"""Tasks that run beside a block of code and end with it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


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
