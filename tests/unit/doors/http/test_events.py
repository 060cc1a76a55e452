"""doors/http/events.py: what every client reads as the same events."""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest

from neuronpipe.core.errors import Unavailable
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.problems import OPENAI_ERROR, PROBLEM_DETAILS


async def _parts(*values: Any) -> tuple[str, bytes]:
    async def made() -> AsyncGenerator[Any, None]:
        for value in values:
            yield value

    response = event_response(made(), OPENAI_ERROR, "[DONE]")
    assert response.stream
    return response.media_type, b"".join([part async for part in response.stream])


async def test_the_encoding_is_told() -> None:
    assert (await _parts())[0] == "text/event-stream; charset=utf-8"


async def test_no_character_of_a_text_ends_a_line() -> None:
    text = "".join(map(chr, range(0x250))) + "\u2028\u2029\u20ac\U0001f600"
    _, data = await _parts({"text": text})
    lines = data.decode().splitlines()  # as of a client that reads lines of text: at each end that Unicode knows
    assert lines == [lines[0], "", "data: [DONE]", ""]
    assert orjson.loads(lines[0].removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("ends_with", ["an error of the pipeline", "the end of the process"])
async def test_an_error_is_an_event_as_the_values_before_it(ends_with: str) -> None:
    """The type of problem details, a URI, is no name of an event: the console, and readers of `message`, take none."""
    error = Unavailable("the executor service cannot be reached, after 3 tokens of the text")

    async def made() -> AsyncGenerator[Any, None]:
        yield {"start": {}}
        raise error

    response = event_response(made(), PROBLEM_DETAILS)
    assert response.stream
    assert response.last_event
    parts = [part async for part in response.stream]
    last = parts[-1] if ends_with == "an error of the pipeline" else response.last_event(error)
    assert orjson.loads(last.removeprefix(b"data: "))["detail"] == error.message
