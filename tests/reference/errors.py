"""docs/reference/errors.md, from the classes of the errors, their codes in each protocol, and the client's retries."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

from google.rpc import code_pb2

from neuronpipe.client.asynchronous import RETRIES
from neuronpipe.core import errors
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.status import CODES, DOMAIN
from neuronpipe.doors.http import problems
from neuronpipe.rpc.transport import RETRY_PUSHBACK
from tests.reference.markdown import NOTE, code, section_link, table, text

_SOURCES = "`core/errors.py`, `core/status.py`, `doors/http/problems.py` and the retry policy of the client"
_HEAD = f"""# Error reference

{NOTE.format(_SOURCES)}

A call that fails ends with a gRPC status. The status has `google.rpc.ErrorInfo` in its details, with the domain
`{DOMAIN}` and the reason below. INVALID_ARGUMENT also has `google.rpc.BadRequest`, which names the field.
RESOURCE_EXHAUSTED also has `google.rpc.RetryInfo`, and the trailer `{RETRY_PUSHBACK}`, which gRPC's own retries
follow. An input that fails in InferBatch or InferStream has the same status in its outcome.

[Over HTTP](../http.md#errors) each protocol has its own form of an error. OpenAI's form has a `code` and a `type`, the
form of TEI an `error_type`, and problem details have the reason.

The Python client raises the class. All classes derive from `NeuronpipeError` and can be imported from
`neuronpipe.client`. A status with another code, which no service of neuronpipe sends, becomes InternalError.

## Codes"""
_MESSAGES = """
## Meaning and remedy

The last column links to the messages of the error, with the cause and the remedy of each."""

_RETRIES = """
## Retries of the Python client

The clients repeat calls that end with {codes}, with at most {attempts} attempts in
all. They wait about {first} before the second attempt and at most about {longest} before later ones, or as long as the
server asks for. They do not repeat calls while most calls fail. The deadline of a call includes its retries. Errors
in the outcomes of `infer_batch` and `infer_stream` are not retried. `Client(target, retries=False)` turns retries off.

## Errors of the command line

`SetupError` is raised on this machine only: {meaning}
`neuronpipe` prints the message and ends with exit code 2. For the errors above it prints the reason and the message,
and ends with exit code 1.
"""


# Error → the sections of docs/troubleshooting.md with its messages.
_SECTIONS: Mapping[type[NeuronpipeError], Sequence[str]] = {
    errors.Unauthenticated: ("unauthenticated-send-a-key",),
    errors.InvalidInput: ("invalid_argument-fix-the-input",),
    errors.ModelNotFound: ("not_found-failed_precondition",),
    errors.WrongTask: ("not_found-failed_precondition",),
    errors.JobNotFound: ("jobs",),
    errors.AlreadyExists: ("jobs",),
    errors.NotAllowed: ("permission_denied",),
    errors.ChangeRefused: ("not_found-failed_precondition",),
    errors.NotConfigured: ("not_configured-set-the-server-up", "jobs"),
    errors.Overloaded: ("resource_exhausted-retry-later",),
    errors.DeadlineExceeded: ("deadline_exceeded",),
    errors.Cancelled: ("unavailable-retry",),
    errors.Unavailable: ("unavailable-retry",),
    errors.InternalError: ("internal-a-fault-of-the-server",),
}


def page() -> str:
    """The page."""
    retries = _RETRIES.format(
        codes=_listed(_policy["retryableStatusCodes"]),
        attempts=_policy["maxAttempts"],
        first=_policy["initialBackoff"].replace("s", " s"),
        longest=_policy["maxBackoff"].replace("s", " s"),
        meaning=f"{_meaning(SetupError)[:1].lower()}{_meaning(SetupError)[1:]}",
    )
    return "\n".join([_HEAD, *_codes(), _MESSAGES, *_meanings()]) + "\n" + retries


def _codes() -> Iterator[str]:
    """The table of what each protocol calls an error."""
    rows = []
    for kind, number in CODES.items():
        http = problems.CODES[kind]
        names = map(code, (http.openai_code, http.openai_type, http.tei_type))
        rows.append([code(kind.__name__), code(kind.reason), _name(number), str(http.status), *names])
    head = ["Class", "Reason", "gRPC code", "HTTP status", "OpenAI's `code`", "OpenAI's `type`", "TEI's `error_type`"]
    yield from table(head, rows)


def _meanings() -> Iterator[str]:
    """The table of what an error means, and what a caller does about it."""
    rows = []
    for kind, number in CODES.items():
        is_retried = "yes" if _name(number) in _policy["retryableStatusCodes"] else "no"
        places = ", ".join(section_link(f"troubleshooting.md#{section}") for section in _SECTIONS[kind])
        rows.append([code(kind.__name__), _meaning(kind), _what_to_do(kind), is_retried, places])
    yield from table(["Class", "Meaning", "What to do", "Retried by the client", "Messages"], rows)


def _name(number: int) -> str:
    name: str = code_pb2.Code.Name(number)
    return name


def _meaning(kind: type[NeuronpipeError] | type[SetupError]) -> str:
    return text(inspect.getdoc(kind) or "")


def _what_to_do(kind: type[NeuronpipeError]) -> str:
    """As the tree in the module's docstring says."""
    found = re.search(rf"\b{kind.__name__} +(\w.*)", errors.__doc__ or "")
    assert found, f"the tree of core/errors.py has no {kind.__name__}"
    return text(found[1])


def _listed(names: Sequence[str]) -> str:
    """The names as a sentence has them: a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_policy = RETRIES["methodConfig"][0]["retryPolicy"]  # type: ignore[index]
