"""Reads the messages of calls: one, or those of a stream until it is ended."""

import asyncio
from collections.abc import Callable
from typing import Any

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.rpc.rpcs import Context


async def read_message(context: Context) -> Any:
    """The next message, or EOF.

    It is read in a task of its own, which ends with the call. gRPC never frees the 1.5 KB of a read that is cancelled
    (seen 2026-11-22, grpcio 1.85.1), and callers could have as many cancelled as they like.
    """
    reading = asyncio.ensure_future(context.read())
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise


class StreamRead:
    """Reads the messages of one stream, for one task, until it is ended.

    The stream is idle while a read waits and no request is without its answer. `error_of`: see InFlight.waited.
    `is_answered`: whether each request has an answer of its own.
    """

    def __init__(
        self, context: Context, idle: CallerWaits, error_of: Callable[[bool], NeuronpipeError], *, is_answered: bool
    ) -> None:
        self._context = context
        self._idle = idle
        self._error_of = error_of
        self._is_answered = is_answered
        self._unanswered = 0
        self._idle_number: int | None = None
        self._error: NeuronpipeError | None = None
        self._is_ended = False
        self._task: asyncio.Task[Any] | None = None

    async def next(self) -> Any:
        """The next message, or EOF; None where the read was ended. Raises what `error_of` says of an idle stream."""
        task = self._task = asyncio.current_task()
        self._begin_idle()
        try:
            data = await read_message(self._context)
            self._unanswered += self._is_answered
            return data
        except asyncio.CancelledError:
            if not (self._is_ended and task and task.uncancel() == 0):  # cancelled by others
                raise
            if self._error:
                raise self._error from None
            return None
        finally:
            self._task = None
            if self._idle_number is not None:
                self._idle.done(self._idle_number)
                self._idle_number = None

    def answered(self) -> None:
        """A request has its answer."""
        self._unanswered = max(0, self._unanswered - 1)
        self._begin_idle()

    def _begin_idle(self) -> None:
        if self._task and not self._unanswered and self._idle_number is None:
            self._idle_number = self._idle.begin(self._end_idle)

    def _end_idle(self, is_late: bool) -> None:
        self._error = self._error_of(is_late)
        self.end()

    def end(self) -> None:
        """Ends the read that waits, if one does. Not by asyncio.timeout, which takes as long as a small message."""
        if self._task and not self._is_ended:
            self._is_ended = True
            self._task.cancel()
