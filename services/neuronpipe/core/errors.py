"""Every error that callers can get, and what to do about it.

    NeuronpipeError
     ├─ Unauthenticated    send a valid API key or token
     ├─ InvalidInput       fix the input
     ├─ ModelNotFound      ask for another model or version
     ├─ WrongTask          ask for the task that the model has
     ├─ JobNotFound        ask for another job; results are kept for a limited time
     ├─ AlreadyExists      send another request_id, or the same content again
     ├─ NotAllowed         ask the operator, who gives rights to tenants
     ├─ ChangeRefused      ask for another change; the message says what is in its way
     ├─ NotConfigured      set the server up for it; the message names the setting
     ├─ Overloaded         retry after `retry_after_s`
     ├─ DeadlineExceeded   give more time
     ├─ Cancelled          nothing if you cancelled; retry if the server stopped
     ├─ Unavailable        retry: a stage is down or not ready
     └─ InternalError      report a bug; details are in the server's log
    SetupError             fix the command, the settings or the bundle (never crosses the network)
     └─ RefusedBundle      find out who changed the bundle, or sign it

A message names the thing and the limit. It holds no text of the caller and no text of other libraries' exceptions.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

# The shortest retry delay of a refused caller. Servers seldom have room sooner.
_SHORTEST_RETRY_S = 0.05
# The advice of every error that a shorter input mends. A protocol that cannot cut an input gives another advice.
CUT = "set truncation to cut"


class NeuronpipeError(Exception):
    """The error of a request. `reason` is the stable word that goes into google.rpc.ErrorInfo."""

    reason: ClassVar[str]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __init_subclass__(cls, reason: str) -> None:
        cls.reason = reason


class Unauthenticated(NeuronpipeError, reason="UNAUTHENTICATED"):
    """The caller did not prove its identity. The message is the same for every cause; the log has the cause."""


class InvalidInput(NeuronpipeError, reason="INVALID_INPUT"):
    """The input is invalid. `field` names the invalid part, as in the proto."""

    def __init__(self, field: str, problem: str, mentions: Sequence[str] = ()) -> None:
        """`field`: several parts are joined by " and ". `mentions`: the fields that `problem` names by the last word of
        their path, in the order of `problem`, so that a protocol can write its own names. `truncation` stands for the
        advice CUT.
        """
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
        self.mentions = mentions

    def index_in(self, name: str) -> int | None:
        """Returns the index of the invalid element if `field` is an element of the list `name`, and None otherwise."""
        field, _, index = self.field.removesuffix("]").partition("[")
        return int(index) if field == name and index.isdecimal() else None


class ModelNotFound(NeuronpipeError, reason="MODEL_NOT_FOUND"):
    """The model or version is not served."""


class WrongTask(NeuronpipeError, reason="WRONG_TASK"):
    """The model exists, but the input is for another task."""


class JobNotFound(NeuronpipeError, reason="JOB_NOT_FOUND"):
    """The caller has no such job, or the job's time has passed."""


class AlreadyExists(NeuronpipeError, reason="ALREADY_EXISTS"):
    """Another job has this id, with other content."""


class NotAllowed(NeuronpipeError, reason="NOT_ALLOWED"):
    """The caller's tenant does not have the right to make this call."""


class ChangeRefused(NeuronpipeError, reason="CHANGE_REFUSED"):
    """The registry cannot be changed, or read, as the call asks."""


class NotConfigured(NeuronpipeError, reason="NOT_CONFIGURED"):
    """The server is not set up for this call."""


class Overloaded(NeuronpipeError, reason="OVERLOADED"):
    """The server is overloaded. Retry after `retry_after_s` seconds, not before."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def retry_delay_s(wait_s: float, longest_s: float = math.inf) -> float:
    """Returns the retry delay of a caller who is refused because of a wait."""
    return min(longest_s, max(_SHORTEST_RETRY_S, wait_s))


class DeadlineExceeded(NeuronpipeError, reason="DEADLINE_EXCEEDED"):
    """The deadline passed before the work was done. Work that had not started was never computed."""


class Cancelled(NeuronpipeError, reason="CANCELLED"):
    """The caller cancelled the call or disconnected, or the server ended the call because it stopped."""


class Unavailable(NeuronpipeError, reason="UNAVAILABLE"):
    """A stage cannot be reached, or is not ready yet."""


class InternalError(NeuronpipeError, reason="INTERNAL"):
    """A bug or fault of the server. The message is a fixed text; the details are in the server's log."""


class SetupError(Exception):
    """A command, a setting or a bundle is wrong, and the message names it and the remedy."""


class RefusedBundle(SetupError):
    """The files of a bundle differ from the compiled files, or from the files that a trusted key signed."""


_MAX_REASON = 300


def first_line(error: BaseException) -> str:
    """Returns another library's exception as one line, for users of commands."""
    lines = text_lines(error) or [type(error).__name__]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if isinstance(error, KeyError) and " " not in text:  # a KeyError's text is the key alone
        text = f"{text} is missing"
    return shortened(text)


def text_lines(error: BaseException) -> list[str]:
    """Returns the lines of an exception's text without empty lines and indents."""
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def shortened(text: str) -> str:
    """Returns a text of another library, cut if it is long."""
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + "…"
