"""Runs CPU work in threads, one piece of a lane at a time. Small work runs on the event loop, where it ends sooner."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from neuronpipe.core.errors import Overloaded
from neuronpipe.platform.process.group_queue import GroupQueue

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")

# Handing work to a thread and its result back takes 0.1 ms (measured 2026-11-21, 2 virtual cores), and 0.4 ms while
# the event loop is busy. Tokenizing 50 tokens takes 0.1 ms. Inputs of this size altogether are processed in half a
# millisecond, for which the event loop can wait once in a pass.
_INLINE_BYTES = 4096
# If one or two models have long work, a thread is left for the next model. More threads would compete for the CPUs.
_THREADS = 4
# Maximum number of waiting pieces of one lane, without the running piece.
_MAX_WAITING = 4096


@dataclass(eq=False, frozen=True)
class _Turn:
    """Small work that waits for a pass of the event loop. `begun`: done in the pass in which the work may run."""

    size_bytes: int
    begun: asyncio.Future[None]


class _Piece(Future[Any]):
    """Work for a thread, and its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work


class Lanes:
    """A few threads that the lanes share, and one budget for small work in each pass of the event loop."""

    def __init__(self, name: str, threads: int = _THREADS) -> None:
        """`name`: the start of the threads' names."""
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._inline_bytes = 0
        self._turns: GroupQueue[_Turn] = GroupQueue()

    def lane(self, name: str) -> "Lane":
        """Returns a new lane, whose name appears in errors."""
        return Lane(name, self, self._pool)

    def take_turn(self, group: str, size_bytes: int) -> asyncio.Future[None] | None:
        """Counts small work of this size for a pass of the event loop. Returns None if the work may run in this pass;
        otherwise a future that is done in the pass in which the work may run. Groups take turns.
        """
        if self.take_room(size_bytes):
            return None
        turn = _Turn(size_bytes, asyncio.get_running_loop().create_future())
        self._turns.put(group, turn)
        return turn.begun

    def take_room(self, size_bytes: int) -> bool:
        """Counts small work of this size for this pass of the event loop, and returns whether it had room."""
        if self._turns or self._inline_bytes + size_bytes > _INLINE_BYTES:
            return False
        if not self._inline_bytes:
            asyncio.get_running_loop().call_soon(self._begin_pass)
        self._inline_bytes += size_bytes
        return True

    def _begin_pass(self) -> None:
        self._inline_bytes = 0
        while self._turns and self._inline_bytes + self._turns.first().size_bytes <= _INLINE_BYTES:
            turn = self._turns.take()
            if not turn.begun.done():  # otherwise its caller has left
                turn.begun.set_result(None)
                self._inline_bytes += turn.size_bytes
        if self._inline_bytes:
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def close(self) -> None:
        """Ends the threads. Close the lanes first."""
        self._pool.shutdown()


class Lane:
    """One model's CPU work of one kind. Pieces that go to a thread run one at a time: groups, such as tenants, take
    turns, and the pieces of a group run in order. `Lanes` makes it.

    After each piece, a lane with more work queues up behind the other lanes.
    """

    def __init__(self, name: str, lanes: Lanes, pool: ThreadPoolExecutor) -> None:
        self._name = name
        self._lanes = lanes
        self._pool = pool
        # Guards the fields below, which the event loop and a thread change.
        self._lock = threading.Lock()
        self._waiting: GroupQueue[_Piece] = GroupQueue()
        # The piece that a thread runs or takes next, even if its caller has left.
        self._turn: Future[None] | None = None

    async def run(
        self,
        group: str,
        size_bytes: int,
        work: Callable[ParametersT, ResultT],
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> ResultT:
        """Runs the work on the event loop if its input is small and the lane is idle, otherwise in a thread.

        Small work is spread over passes of the event loop. If the lane has work in a thread, small work also queues
        there: otherwise the event loop would wait for the tokenizer's lock. Work whose caller leaves before the work
        began is not done. Raises Overloaded, any error of the work, and RuntimeError for a panic of a library in Rust.
        """
        if size_bytes <= _INLINE_BYTES and not self._turn:
            if turn := self._lanes.take_turn(group, size_bytes):
                await turn
            if not self._turn:
                return _call(work, *args, **kwargs)
        return await asyncio.wrap_future(self._queue(group, partial(_call, work, *args, **kwargs)))

    def run_at_once(
        self,
        size_bytes: int,
        work: Callable[ParametersT, ResultT],
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> ResultT | None:
        """Runs small work now, on the event loop, if `run` would not wait for anything. Otherwise returns None.

        Raises the errors of the work, as `run` does.
        """
        if self._turn or not self._lanes.take_room(size_bytes):
            return None
        return _call(work, *args, **kwargs)

    async def close(self) -> None:
        """Cancels the waiting work, and returns when the running piece has ended."""
        for piece in list(self._waiting):
            piece.cancel()
        if turn := self._turn:
            await asyncio.wrap_future(turn)

    def _queue(self, group: str, work: Callable[[], ResultT]) -> "Future[ResultT]":
        piece = _Piece(work)
        with self._lock:
            if len(self._waiting) >= _MAX_WAITING:
                raise Overloaded(f"{_MAX_WAITING} inputs wait for {self._name}, which is the limit", retry_after_s=1)
            self._waiting.put(group, piece)
            if not self._turn:
                self._turn = self._pool.submit(self._do_next)
        piece.add_done_callback(partial(self._forget, group))
        return piece

    def _forget(self, group: str, piece: Any) -> None:
        if piece.cancelled():
            with self._lock:
                self._waiting.discard(group, piece)

    def _do_next(self) -> None:
        result: Any = None
        error: BaseException | None = None
        with self._lock:
            piece = self._waiting.take() if self._waiting else None
        is_wanted = piece is not None and piece.set_running_or_notify_cancel()
        if piece and is_wanted:
            try:
                result = piece.work()
            except BaseException as fault:
                error = fault
        # The lane is free before its caller continues, as the caller may have more work.
        with self._lock:
            self._turn = self._pool.submit(self._do_next) if self._waiting else None
        if piece and is_wanted:
            if error:
                piece.set_exception(error)
            else:
                piece.set_result(result)
        # The error's traceback refers to this frame, so error and frame would keep each other alive.
        error = None


def _call(work: Callable[ParametersT, ResultT], *args: ParametersT.args, **kwargs: ParametersT.kwargs) -> ResultT:
    """Calls the work. Raises RuntimeError for a panic of a library in Rust."""
    try:
        return work(*args, **kwargs)
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:  # PyO3's PanicException is no Exception, so no door would answer the call
        raise RuntimeError("a library panicked") from panic


def is_on_event_loop() -> bool:
    """Returns whether the caller runs on the event loop and not in a lane's thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
