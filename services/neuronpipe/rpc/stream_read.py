"""Reads the messages of a stream until it is ended, and ends it where it is idle for too long."""

from collections.abc import Callable

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.rpc.transport import ServerCall


class StreamRead:
    """Reads the messages of one stream, for one task.

    The stream is idle while a read waits and no request is without its answer. `error_of`: see InFlight.waited.
    `is_answered`: whether each request has an answer of its own.
    """

    def __init__(
        self, call: ServerCall, idle: CallerWaits, error_of: Callable[[bool], NeuronpipeError], *, is_answered: bool
    ) -> None:
        self._call = call
        self._idle = idle
        self._error_of = error_of
        self._is_answered = is_answered
        self._unanswered = 0
        self._idle_number: int | None = None
        self._is_reading = False

    async def next(self) -> bytes | None:
        """The next message; None at the end. Raises what `error_of` says of an idle stream, and what ends it."""
        self._is_reading = True
        self._begin_idle()
        try:
            data = await self._call.read()
            self._unanswered += self._is_answered
            return data
        finally:
            self._is_reading = False
            if self._idle_number is not None:
                self._idle.done(self._idle_number)
                self._idle_number = None

    def answered(self) -> None:
        """A request has its answer."""
        self._unanswered = max(0, self._unanswered - 1)
        self._begin_idle()

    def _begin_idle(self) -> None:
        if self._is_reading and not self._unanswered and self._idle_number is None:
            self._idle_number = self._idle.begin(lambda is_late: self.end(self._error_of(is_late)))

    def end(self, error: NeuronpipeError) -> None:
        """Makes the read that waits, and later ones, raise an error."""
        self._call.stop_reading(error)
