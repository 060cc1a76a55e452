"""Logs as JSON lines on standard error: a line for a change of state, and for each request if it is asked for."""

import json
import logging
import sys
import time
import traceback

from neuronpipe.core.errors import SetupError
from neuronpipe.core.tracing import current_span

_LOGGER = logging.getLogger("neuronpipe")
_REQUESTS = logging.getLogger("neuronpipe.requests")
# Values of the variable NEURONPIPE_LOG → the lowest level of lines that are not about a request.
LEVELS = {"warnings": logging.WARNING, "changes": logging.INFO, "requests": logging.INFO}

# The shortest time between two warnings of one kind that callers can cause at will.
_SELDOM_S = 1.0


class _JsonLines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "event": record.getMessage(),
        }
        if span := current_span():
            line |= span.context.ids
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1]:
            line["exception"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, default=str)


def start_logging(service: str, lines: str = "", *, is_front: bool = False) -> None:
    """Sends the logs of this process to standard error under the service's name. For cli only, once.

    `lines`: a key of LEVELS; empty for changes. `is_front`: the parent's log has the changes. Raises SetupError.
    """
    lines = lines or "changes"
    if lines not in LEVELS:
        raise SetupError(f"NEURONPIPE_LOG: {lines!r} must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(service))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(logging.WARNING if is_front else LEVELS[lines])
    _REQUESTS.setLevel(logging.INFO if lines == "requests" else logging.CRITICAL)


def log(event: str, **fields: object) -> None:
    _LOGGER.info(event, extra={"fields": fields})


def log_request(**fields: object) -> None:
    """Logs a request that has ended, if the log has requests."""
    _REQUESTS.info("request", extra={"fields": fields})


def logs_requests() -> bool:
    return _REQUESTS.isEnabledFor(logging.INFO)


def log_warning(event: str, **fields: object) -> None:
    """Logs something that an operator should look at."""
    _LOGGER.warning(event, extra={"fields": fields})


class SeldomWarnings:
    """Warnings of which each kind is logged at most once a second."""

    def __init__(self) -> None:
        self._logged_s: dict[tuple[str, str], float] = {}

    def log(self, event: str, kind: str = "", **fields: object) -> None:
        """Logs an event, unless it was logged with this kind within the last second. There must be few kinds."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get((event, kind), -_SELDOM_S) >= _SELDOM_S:
            self._logged_s[event, kind] = now_s
            log_warning(event, **fields)


def log_fault(event: str, fault: BaseException, **fields: object) -> None:
    _LOGGER.error(event, exc_info=fault, extra={"fields": fields})
