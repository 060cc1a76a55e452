"""Every error that callers can get, by what they should do about it.

    NeuronpipeError
     ├─ InvalidInput       fix the input
     ├─ ModelNotFound      ask for another model or version
     ├─ WrongTask          ask for the task that the model has
     ├─ Overloaded         retry after `retry_after_s`
     ├─ DeadlineExceeded   give more time
     ├─ Cancelled          nothing where you left; retry where the server stopped
     ├─ Unavailable        retry: a stage is down or not ready
     └─ InternalError      report a bug; details are in the server's log
    SetupError             fix the command, the settings or the bundle (never crosses the network)

A message names the thing and the limit and holds no text of the caller's and none of another library's exceptions.
"""

from typing import ClassVar


class NeuronpipeError(Exception):
    """What a request failed with. `reason` is the stable word that goes into google.rpc.ErrorInfo."""

    reason: ClassVar[str] = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(NeuronpipeError):
    """The input is at fault. `field` names the part of it, in the words of the proto."""

    reason = "INVALID_INPUT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelNotFound(NeuronpipeError):
    """No such model or version is served."""

    reason = "MODEL_NOT_FOUND"


class WrongTask(NeuronpipeError):
    """The model exists and has another task than the input."""

    reason = "WRONG_TASK"


class Overloaded(NeuronpipeError):
    """Too much waits already. Trying again makes sense after `retry_after_s` seconds, not before."""

    reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(NeuronpipeError):
    """The deadline passed before the work was done; what had not started was never computed."""

    reason = "DEADLINE_EXCEEDED"


class Cancelled(NeuronpipeError):
    """The call ended before its answer: the caller left, or the server stopped meanwhile."""

    reason = "CANCELLED"


class Unavailable(NeuronpipeError):
    """A stage cannot be reached, or is not ready yet."""

    reason = "UNAVAILABLE"


class InternalError(NeuronpipeError):
    """A fault of the server. The message is fixed by our code; what really happened is in the log."""

    reason = "INTERNAL"


class SetupError(Exception):
    """A command, a setting or a bundle is at fault; the message says which, and what would be right."""
