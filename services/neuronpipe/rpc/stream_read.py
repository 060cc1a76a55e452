"""Reads the requests of a stream, and ends a stream that is idle."""

from collections.abc import Callable
from dataclasses import dataclass

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.rpc.transport import ServerCall


@dataclass(eq=False)
class StreamRead:
    """Reads the messages of one stream, for one task.

    The stream is idle while a read waits and every request has its answer. `error_of`: see InFlight.waited.
    `is_answered`: whether each request gets its own answer.
    """

    call: ServerCall
    idle: CallerWaits
    error_of: Callable[[bool], NeuronpipeError]
    is_answered: bool
    _unanswered: int = 0
    _idle_number: int | None = None
    _is_reading: bool = False

    async def next(self) -> bytes | None:
        """Returns the next message, or None at the end. Raises `error_of(…)` for an idle stream, and other errors."""
        self._is_reading = True
        self._begin_idle()
        try:
            data = await self.call.read()
            self._unanswered += self.is_answered
            return data
        finally:
            self._is_reading = False
            if self._idle_number is not None:
                self.idle.remove(self._idle_number)
                self._idle_number = None

    def answered(self) -> None:
        """Notes that a request got its answer."""
        self._unanswered = max(0, self._unanswered - 1)
        self._begin_idle()

    def _begin_idle(self) -> None:
        if self._is_reading and not self._unanswered and self._idle_number is None:
            self._idle_number = self.idle.begin(lambda is_late: self.end(self.error_of(is_late)))

    def end(self, error: NeuronpipeError) -> None:
        """Makes the waiting read, and later reads, raise an error."""
        self.call.stop_reading(error)
