"""Server-sent events: a text as it comes, over HTTP."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import HttpResponse
from neuronpipe.doors.http.problems import ErrorForm, problem_of

# Proxies pass each event on at once.
_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


def event_response(values: AsyncGenerator[Any, None], error_form: ErrorForm, last: str = "") -> HttpResponse:
    """An answer with an event for each value, in JSON, and one with the text `last`.

    An error that comes when the first values have left already is an event, too, and the last one.
    """
    return HttpResponse(b"", "text/event-stream", _HEADERS, stream=_events(values, error_form, last))


async def _events(values: AsyncGenerator[Any, None], error_form: ErrorForm, last: str) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(values):
            async for value in values:
                yield _event(write_body(value))
    except NeuronpipeError as error:
        yield _event(write_body(error_form.write(problem_of(error))))
        return
    if last:
        yield _event(last.encode())


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
