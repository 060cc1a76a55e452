"""Server-sent events, over HTTP: a text while the model generates it."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import HttpResponse
from neuronpipe.doors.http.problems import PROBLEM_DETAILS, ErrorForm, problem_of

# Proxies pass each event on at once.
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
# Clients that follow RFC 2616 would read Latin-1 without the encoding.
EVENTS = "text/event-stream; charset=utf-8"
# Characters that some clients take for the end of a line. JSON has them in strings only.
_LINE_ENDS = {text.encode(): json.dumps(text).strip('"').encode() for text in "\u0085\u2028\u2029"}


def event_response(values: AsyncGenerator[Any, None], error_form: ErrorForm, last: str = "") -> HttpResponse:
    """Returns an answer with an event for each value, in JSON, and an event with the text `last`.

    The `type` of a value is the event's name. An error that comes after the first values is the last event.
    """

    def error_event(error: NeuronpipeError) -> bytes:
        body = error_form.write(problem_of(error))
        # The type of problem details is a URI (RFC 9457, 3.1.1) and no event's name.
        return event(write_body(body)) if error_form is PROBLEM_DETAILS else _written(body)

    return HttpResponse(b"", EVENTS, _HEADERS, stream=_events(values, error_event, last), last_event=error_event)


async def _events(
    values: AsyncGenerator[Any, None], error_event: Callable[[NeuronpipeError], bytes], last: str
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(values):
            async for value in values:
                yield _written(value)
    except NeuronpipeError as error:
        yield error_event(error)
        return
    if last:
        yield event(last.encode())


def _written(value: Any) -> bytes:
    return event(write_body(value), value.get("type", "") if isinstance(value, dict) else "")


def event(data: bytes, name: str = "") -> bytes:
    """Returns an event with a value in JSON."""
    if not data.isascii():
        for end, escaped in _LINE_ENDS.items():
            data = data.replace(end, escaped)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
