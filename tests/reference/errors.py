"""docs/reference/errors.md, from the classes of the errors, their codes, and the client's retries."""

import inspect
import re
from collections.abc import Sequence

from google.rpc import code_pb2

from neuronpipe.client.asynchronous import RETRIES
from neuronpipe.core import errors
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.status import CODES, DOMAIN
from neuronpipe.rpc.transport import RETRY_PUSHBACK
from tests.reference.markdown import NOTE, code, table, text

_HEAD = f"""# Error reference

{NOTE.format("`core/errors.py`, `core/status.py` and the retry policy of the client")}

A call that fails ends with a gRPC status. The status has `google.rpc.ErrorInfo` in its details, with the domain
`{DOMAIN}` and the reason below. INVALID_ARGUMENT also has `google.rpc.BadRequest`, which names the field.
RESOURCE_EXHAUSTED also has `google.rpc.RetryInfo`, and the trailer `{RETRY_PUSHBACK}`, which gRPC's own retries
follow. An input that fails in InferBatch or InferStream has the same status in its outcome. The Python client raises
the class of the status; all of them derive from `NeuronpipeError` and can be imported from `neuronpipe.client`. A
status with another code, which no service of neuronpipe sends, becomes InternalError."""

_RETRIES = """
## Retries of the Python client

The clients repeat calls that end with {codes}, with at most {attempts} attempts in
all. They wait about {first} before the second attempt and at most about {longest} before later ones, or as long as the
server asks for. They do not repeat calls while most calls fail. The deadline of a call includes its retries. Errors
in the outcomes of `infer_batch` and `infer_stream` are not retried. `Client(target, retries=False)` turns retries off.

## Errors of the command line

`SetupError` never crosses the network. {meaning} What to do: {what_to_do}.
`neuronpipe` prints the message and ends with exit code 2. For the errors above it prints the reason and the message,
and ends with exit code 1.
"""


def page() -> str:
    """The page."""
    head = ["Class", "gRPC code", "Reason", "Meaning", "What to do", "Retried by the client"]
    rows = []
    for kind, number in CODES.items():
        name = code_pb2.Code.Name(number)
        is_retried = "yes" if name in _policy["retryableStatusCodes"] else "no"
        rows.append([code(kind.__name__), name, code(kind.reason), _meaning(kind), _what_to_do(kind), is_retried])
    retries = _RETRIES.format(
        codes=_listed(_policy["retryableStatusCodes"]),
        attempts=_policy["maxAttempts"],
        first=_policy["initialBackoff"].replace("s", " s"),
        longest=_policy["maxBackoff"].replace("s", " s"),
        meaning=_meaning(SetupError),
        what_to_do=_what_to_do(SetupError).partition(" (")[0],
    )
    return "\n".join([_HEAD, *table(head, rows)]) + "\n" + retries


def _meaning(kind: type[NeuronpipeError] | type[SetupError]) -> str:
    return text(inspect.getdoc(kind) or "")


def _what_to_do(kind: type[NeuronpipeError] | type[SetupError]) -> str:
    """As the tree in the module's docstring says."""
    found = re.search(rf"\b{kind.__name__} +(\w.*)", errors.__doc__ or "")
    assert found, f"the tree of core/errors.py has no {kind.__name__}"
    return text(found[1])


def _listed(names: Sequence[str]) -> str:
    """The names as a sentence has them: a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_policy = RETRIES["methodConfig"][0]["retryPolicy"]  # type: ignore[index]
