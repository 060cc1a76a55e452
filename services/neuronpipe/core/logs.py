"""Logs as JSON lines on standard error: one line for a change of state, none on the happy path of a request."""

import json
import logging
import sys
import time
import traceback

from neuronpipe.core.tracing import current_span

_LOGGER = logging.getLogger("neuronpipe")


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


def start_logging(service: str, level: int = logging.INFO) -> None:
    """Sends the logs of this process to standard error under the service's name. For cli only, once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(service))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(level)


def log(event: str, **fields: object) -> None:
    _LOGGER.info(event, extra={"fields": fields})


def log_warning(event: str, **fields: object) -> None:
    """Logs something that an operator should look at."""
    _LOGGER.warning(event, extra={"fields": fields})


def log_fault(event: str, fault: BaseException, **fields: object) -> None:
    _LOGGER.error(event, exc_info=fault, extra={"fields": fields})
