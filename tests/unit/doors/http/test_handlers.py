"""doors/http/handlers.py: the page of metrics."""

import asyncio
import threading

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.metrics import Meters
from neuronpipe.doors.http.exchange import HttpRequest, HttpResponse
from neuronpipe.doors.http.handlers import metrics_handlers
from neuronpipe.platform.telemetry.prometheus import write_page
from tests.suite.waiting import happens

_OPEN = "application/openmetrics-text"
# As Prometheus 3 sends it.
_PROMETHEUS = (
    f"{_OPEN};version=1.0.0;escaping=allow-utf-8;q=0.6,{_OPEN};version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def _request(accept: str) -> HttpRequest:
    return HttpRequest(Call(), {}, "", {b"accept": accept.encode()}, "", b"")


async def test_callers_share_a_page_of_each_format_whatever_they_accept() -> None:
    may_write, written = threading.Event(), list[str]()

    def write(accept: str) -> tuple[bytes, str]:
        written.append(accept)
        may_write.wait(20)
        return b"page", "text/plain"

    ((_, metrics),) = metrics_handlers(write)
    before = len(asyncio.all_tasks())
    first = asyncio.ensure_future(metrics(_request("text/plain")))
    await happens(lambda: len(written) == 1)
    accepted = [f"text/plain; version={number}" for number in range(500)]
    accepted += [f"{_OPEN}; version=1.0.{number}" for number in range(500)]
    asked = [asyncio.ensure_future(metrics(_request(accept))) for accept in accepted]
    await asyncio.sleep(0.05)
    # Those who ask, the first page, and the next one of each format.
    assert len(asyncio.all_tasks()) == before + 1 + len(asked) + 3
    may_write.set()
    await asyncio.gather(first, *asked)
    assert written == ["", "", _OPEN]


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", "text/plain; version=0.0.4"),
        (_OPEN, f"{_OPEN}; version=1.0.0"),
        (f"{_OPEN}; version=no-number", f"{_OPEN}; version=1.0.0"),
        (_PROMETHEUS, f"{_OPEN}; version=1.0.0"),
    ],
)
async def test_a_page_has_a_format_that_its_caller_reads(accept: str, media_type: str) -> None:
    ((_, metrics),) = metrics_handlers(lambda accept: write_page(Meters(), accept))
    response = await metrics(_request(accept))
    assert isinstance(response, HttpResponse)
    assert response.media_type.startswith(media_type)
