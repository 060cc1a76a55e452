"""Errors over HTTP: a table from our classes to status codes and each protocol's words, and the forms of the bodies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from neuronpipe.core import errors
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded, Unauthenticated, Unavailable

# Time that a caller should wait if the server stops or starts: then it answers, or another server does.
_UNAVAILABLE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ErrorCodes:
    """The HTTP status of an error, and its names.

    `openai_type` and `openai_code` become `type` and `code` of OpenAI's error, `tei_type` the `error_type` of TEI's.
    """

    status: int
    openai_type: str
    openai_code: str
    tei_type: str


CODES: dict[type[NeuronpipeError], ErrorCodes] = {
    errors.Unauthenticated: ErrorCodes(401, "invalid_request_error", "invalid_api_key", "Unauthorized"),
    errors.InvalidInput: ErrorCodes(400, "invalid_request_error", "invalid_input", "Validation"),
    errors.ModelNotFound: ErrorCodes(404, "invalid_request_error", "model_not_found", "Validation"),
    errors.WrongTask: ErrorCodes(400, "invalid_request_error", "wrong_task", "Validation"),
    errors.JobNotFound: ErrorCodes(404, "invalid_request_error", "job_not_found", "Validation"),
    errors.AlreadyExists: ErrorCodes(409, "invalid_request_error", "already_exists", "Validation"),
    errors.NotAllowed: ErrorCodes(403, "invalid_request_error", "not_allowed", "Validation"),
    errors.ChangeRefused: ErrorCodes(412, "invalid_request_error", "change_refused", "Validation"),
    errors.NotConfigured: ErrorCodes(501, "invalid_request_error", "not_configured", "Validation"),
    errors.Overloaded: ErrorCodes(429, "rate_limit_error", "rate_limit_exceeded", "Overloaded"),
    errors.DeadlineExceeded: ErrorCodes(504, "server_error", "deadline_exceeded", "Backend"),
    errors.Cancelled: ErrorCodes(499, "server_error", "cancelled", "Backend"),
    errors.Unavailable: ErrorCodes(503, "server_error", "unavailable", "Unhealthy"),
    errors.InternalError: ErrorCodes(500, "server_error", "internal_error", "Backend"),
}


class RequestRefused(Exception):
    """A request that the door refuses. `status`: 4xx or 501. `title`: its name. `headers`: its prescribed headers."""

    def __init__(self, status: int, title: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.title = title
        self.message = message
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Problem:
    """The description of an error, from which every protocol writes its form.

    `field`: the part of the body at fault, or empty. `retry_after_s`: None if the caller need not try again.
    """

    codes: ErrorCodes
    reason: str
    message: str
    field: str = ""
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of a protocol's errors. `shape`: the types of the fields, of which a `name?` may be missing."""

    write: Callable[[Problem], dict[str, Any]]
    shape: Mapping[str, Any]
    media_type: str = "application/json"


def problem_of(error: NeuronpipeError | RequestRefused) -> Problem:
    """Returns the description of an error for callers."""
    if isinstance(error, RequestRefused):
        codes = ErrorCodes(error.status, "invalid_request_error", error.title, "Validation")
        return Problem(codes, error.title.upper(), error.message, headers=error.headers)
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    if isinstance(error, Unavailable):
        retry_after_s = _UNAVAILABLE_RETRY_S
    field = error.field if isinstance(error, InvalidInput) else ""
    headers = ((b"www-authenticate", b"Bearer"),) if isinstance(error, Unauthenticated) else ()  # RFC 9110, 11.6.1
    return Problem(
        CODES[type(error)], error.reason, error.message, field=field, retry_after_s=retry_after_s, headers=headers
    )


def _problem_details(problem: Problem) -> dict[str, Any]:
    title, status = problem.codes.openai_code.replace("_", " "), problem.codes.status
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": problem.message,
        "reason": problem.reason,
    }
    return body | {"field": problem.field} if problem.field else body


def _openai_error(problem: Problem) -> dict[str, Any]:
    kind, code = problem.codes.openai_type, problem.codes.openai_code
    return {"error": {"message": problem.message, "type": kind, "param": problem.field or None, "code": code}}


# RFC 9457, with our reason and the field at fault as extensions.
PROBLEM_DETAILS = ErrorForm(
    _problem_details,
    {"type": str, "title": str, "status": int, "detail": str, "reason": str, "field?": str},
    "application/problem+json",
)
OPENAI_ERROR = ErrorForm(_openai_error, {"error": {"message": str, "type": str, "param": str | None, "code": str}})
# The error for a path that no protocol has here. OpenAI's clients show only `error`.
UNKNOWN_PATH = replace(PROBLEM_DETAILS, write=lambda problem: _problem_details(problem) | _openai_error(problem))
# Hugging Face's servers also have `error`.
TEI_ERROR = ErrorForm(
    lambda problem: {"error": problem.message, "error_type": problem.codes.tei_type}, {"error": str, "error_type": str}
)
# TGI's words, by which huggingface_hub chooses the class to raise.
_TGI_TYPES = {"Validation": "validation", "Overloaded": "overloaded"}
TGI_ERROR = ErrorForm(
    lambda problem: {"error": problem.message, "error_type": _TGI_TYPES.get(problem.codes.tei_type, "generation")},
    {"error": str, "error_type": str},
)
# Cohere has `message`, Jina `detail`.
COHERE_ERROR = ErrorForm(
    lambda problem: {"message": problem.message, "detail": problem.message}, {"message": str, "detail": str}
)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _anthropic_error(problem: Problem) -> dict[str, Any]:
    status = problem.codes.status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


ANTHROPIC_ERROR = ErrorForm(_anthropic_error, {"type": str, "error": {"type": str, "message": str}})
OIP_ERROR = ErrorForm(lambda problem: {"error": problem.message}, {"error": str})
