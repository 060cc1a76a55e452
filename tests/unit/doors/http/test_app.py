"""doors/http/app.py: what HTTP itself prescribes, whatever the protocol."""

import asyncio
import gzip
import re
import time
import zlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionResult,
    GeneratedText,
    RankedText,
    RerankResult,
    SentenceEmbeddingResult,
    SentenceSimilarityResult,
    TaskInput,
    TaskResult,
    TextGenerationResult,
)
from neuronpipe.core.errors import NeuronpipeError, Overloaded
from neuronpipe.doors.http.app import App
from neuronpipe.doors.http.exchange import HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.huggingface import MODEL
from neuronpipe.doors.http.openai import EMBEDDINGS
from neuronpipe.platform.process.in_flight import InFlight
from tests.unit.doors.http.written_pipeline import ROUTES, Browser, RecordedExchange
from tests.unit.every_error import EVERY_ERROR
from tests.unit.model_specs import model_spec

_SPECS = [model_spec("sentence_embedding", also_answers=("sentence_similarity",))]
_BODY = {"model": "small", "input": "a"}


def _answer(input: TaskInput) -> TaskResult:
    return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[1, 2, 3, 4]))


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


async def test_an_unknown_path_is_a_problem_of_rfc_9457(browser: Browser) -> None:
    status, body = await browser.get("/v1/nothing")
    assert status == 404
    assert browser.headers["content-type"] == "application/problem+json"
    assert body["status"] == 404
    assert body["detail"] == "no such path; /openapi.json lists all of them"
    assert body["error"]["message"] == body["detail"]  # OpenAI's clients read nothing else


@pytest.mark.parametrize(
    ("method", "path", "allow"), [("GET", "/v1/embeddings", "POST"), ("POST", "/v1/models/x", "GET, HEAD")]
)
async def test_another_method_is_told_the_right_ones(browser: Browser, method: str, path: str, allow: str) -> None:
    status, _ = await browser.send(method, path, b"{}")
    assert (status, browser.headers["allow"]) == (405, allow)


async def test_head_is_answered_as_get(browser: Browser) -> None:
    status, _ = await browser.send("HEAD", "/v1/models", b"")
    assert status == 200


async def test_only_json_is_taken(browser: Browser) -> None:
    status, body = await browser.post("/v1/embeddings", _BODY, "application/x-www-form-urlencoded")
    assert status == 415
    assert body["error"]["message"] == (
        "content-type: must be application/json (curl: -H 'Content-Type: application/json')"
    )


_BODIES = [
    b"{",
    b"",
    b"null",
    b"[]",
    b"7",
    b'{"inputs": NaN}',
    b'{"inputs": 1e400}',
    b'{"inputs": "\xff"}',
    b'{"inputs": "\\ud800"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
]


@pytest.mark.parametrize("route", [route for route in ROUTES if route.takes], ids=lambda route: route.path)
async def test_what_no_protocol_takes_is_refused_in_the_form_of_each(browser: Browser, route: Route) -> None:
    names = {"name": "small", "task": "feature-extraction", "model": "small", "/form": "", "version": "1"}
    path = re.sub(r"{([\w/]+)}", lambda name: names[name[1]], route.path)
    keys = {name for name in route.error_form.shape if not name.endswith("?")}
    for data in _BODIES:
        status, body = await browser.post(path, data)
        assert (status, set(body) - {"field"}) == (400, keys), data
        assert browser.headers["content-type"] == route.error_form.media_type
    status, body = await browser.post(path, b"{}", "application/xml")
    assert (status, set(body)) == (415, keys)
    assert browser.inputs == []


async def test_json_may_say_its_charset_or_nothing(browser: Browser) -> None:
    assert (await browser.post("/v1/embeddings", _BODY, "Application/JSON; charset=utf-8"))[0] == 200
    assert (await browser.send("POST", "/v1/embeddings", orjson.dumps(_BODY)))[0] == 200


async def test_a_request_for_which_there_is_no_room_is_refused_before_its_body_is_read(browser: Browser) -> None:
    def check_room(remaining_s: float | None) -> None:
        raise Overloaded(f"{remaining_s is not None and remaining_s < 1}", retry_after_s=2)

    browser.in_flight.add_check(check_room)
    status, body = await browser.post("/v1/embeddings", b"{broken", **{"x-request-timeout-ms": "900"})
    assert (status, body["error"]["message"], browser.headers["retry-after"]) == (429, "True", "2")


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("X-Gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_compressed_body_is_read(browser: Browser, encoding: str, compress: Any) -> None:
    status, _ = await browser.post("/v1/embeddings", compress(orjson.dumps(_BODY)), **{"content-encoding": encoding})
    assert status == 200


async def test_a_body_is_compressed_by_nothing_else(browser: Browser) -> None:
    assert (await browser.post("/v1/embeddings", _BODY, **{"content-encoding": "br"}))[0] == 415


@pytest.mark.parametrize(
    "data",
    [b"{}", gzip.compress(b"{}")[:-3], gzip.compress(b"{}") + b"more", b""],
    ids=["not compressed", "cut off", "more behind it", "empty"],
)
async def test_a_body_that_is_not_compressed_as_it_says_is_an_error(browser: Browser, data: bytes) -> None:
    status, body = await browser.post("/v1/embeddings", data, **{"content-encoding": "gzip"})
    assert (status, body["error"]["param"]) == (400, "body")


async def test_a_compressed_body_must_not_become_larger_than_the_limit() -> None:
    browser = Browser(_SPECS, _answer, max_body_bytes=1000)
    status, _ = await browser.post(
        "/v1/embeddings", gzip.compress(b" " * 1_000_000)[:900], **{"content-encoding": "gzip"}
    )
    assert status == 413


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def receive() -> bytes:
        raise AssertionError("was read")

    browser = Browser(_SPECS, _answer, max_body_bytes=100)
    exchange = RecordedExchange("POST", "/v1/embeddings", [(b"content-length", b"101")], receive=receive)
    await browser.app(exchange)
    assert exchange.sent[0]["status"] == 413
    assert b"the body is larger than 100 bytes" in exchange.sent[1]["body"]


async def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    browser = Browser(_SPECS, _answer, max_body_bytes=100)
    status, _ = await browser.send("POST", "/v1/embeddings", b" " * 101)
    assert status == 413


async def test_a_handler_that_waits_for_something_else_ends_soon_after_the_deadline(browser: Browser) -> None:
    async def wait(request: HttpRequest) -> HttpResponse:
        await asyncio.Event().wait()
        raise AssertionError

    browser.app.open([*browser.handlers, (EMBEDDINGS, wait)])
    status, body = await browser.post("/v1/embeddings", _BODY, **{"x-request-timeout-ms": "20"})
    assert (status, body["error"]["message"]) == (504, "the deadline passed before the result was ready")


async def test_the_deadline_is_in_milliseconds_from_now(browser: Browser) -> None:
    before_s = time.monotonic()
    await browser.post("/v1/embeddings", _BODY, x_request_timeout_ms="1500")
    deadline_s = browser.pipeline.asked[0].call.deadline_s
    assert deadline_s is not None
    assert before_s + 1.5 <= deadline_s <= time.monotonic() + 1.5


@pytest.mark.parametrize("timeout", ["-1", "1.5", "soon", "1234567890", "²"])
async def test_a_deadline_that_is_no_number_is_refused(browser: Browser, timeout: str) -> None:
    status, body = await browser.post("/v1/embeddings", _BODY, x_request_timeout_ms=timeout)
    assert status == 400
    assert body["error"]["param"] == "x-request-timeout-ms"


@pytest.mark.parametrize(
    ("headers", "model", "version", "is_bulk"),
    [
        ({}, "small", "", False),
        ({"neuronpipe_version": "1"}, "small", "1", False),
        ({"neuronpipe_priority": "bulk"}, "small", "", True),
        ({"neuronpipe_priority": "interactive", "neuronpipe_model": "other"}, "small", "", False),
    ],
)
async def test_version_and_priority_are_headers(
    browser: Browser, headers: dict[str, str], model: str, version: str, is_bulk: bool
) -> None:
    assert (await browser.post("/v1/embeddings", _BODY, **headers))[0] == 200
    (asked,) = browser.pipeline.asked
    assert (asked.model, asked.version, asked.call.is_bulk) == (model, version, is_bulk)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a"}),
        ("/models/small", {"inputs": "a"}),
        ("/pipeline/feature-extraction/small", {"inputs": "a"}),
        ("/", {"inputs": "a"}),
        ("/invocations", {"inputs": "a"}),
    ],
)
async def test_a_version_counts_on_every_path(browser: Browser, path: str, body: object) -> None:
    assert (await browser.post(path, body, neuronpipe_version="1"))[0] == 200
    assert [(request.model, request.version) for request in browser.pipeline.asked] == [("small", "1")]


async def test_a_model_may_be_named_by_a_header() -> None:
    browser = Browser([*_SPECS, model_spec("sentence_embedding", name="other")], _answer)
    for path, headers in (("/embed", {"neuronpipe_model": "other"}), ("/embed?model=other", {"neuronpipe_model": "x"})):
        assert (await browser.post(path, {"inputs": "a"}, **headers))[0] == 200
    assert [request.model for request in browser.pipeline.asked] == ["other", "other"]


async def test_a_priority_that_is_none_is_refused(browser: Browser) -> None:
    status, body = await browser.post("/v1/embeddings", _BODY, neuronpipe_priority="high")
    assert (status, body["error"]["message"]) == (400, "neuronpipe-priority: must be interactive or bulk")


async def test_a_route_key_goes_on(browser: Browser) -> None:
    await browser.post("/v1/embeddings", _BODY, neuronpipe_route_key="ann")
    assert browser.pipeline.asked[0].call.route_key == "ann"


async def test_a_trace_goes_on(browser: Browser) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await browser.post("/v1/embeddings", _BODY, traceparent=traceparent, tracestate="a=b")
    trace = browser.pipeline.asked[0].call.trace
    assert trace is not None
    assert (trace.traceparent, trace.tracestate) == (traceparent, "a=b")


async def test_a_request_keeps_its_id_or_gets_one(browser: Browser) -> None:
    await browser.post("/v1/embeddings", _BODY, x_request_id="mine")
    assert browser.headers["x-request-id"] == browser.pipeline.asked[0].call.request_id == "mine"
    await browser.post("/v1/embeddings", _BODY, x_request_id="\x07")
    assert browser.headers["x-request-id"] == browser.pipeline.asked[1].call.request_id
    assert len(browser.headers["x-request-id"]) == 32


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_error_of_the_pipeline_is_told_in_the_form_of_the_protocol(error: NeuronpipeError) -> None:
    browser = Browser(_SPECS, lambda given: error)
    status, body = await browser.post("/v1/embeddings", _BODY)
    assert status >= 400
    assert body["error"]["message"].endswith(error.message.removeprefix("top_k: "))
    assert ("retry-after" in browser.headers) == (status in (429, 503))


async def test_retry_after_is_in_whole_seconds_and_in_milliseconds() -> None:
    browser = Browser(_SPECS, lambda given: Overloaded("full", 1.25))
    await browser.post("/v1/embeddings", _BODY)
    assert (browser.headers["retry-after"], browser.headers["retry-after-ms"]) == ("2", "1250")


async def test_a_fault_is_told_by_its_request_only(browser: Browser) -> None:
    async def fail(request: HttpRequest) -> HttpResponse:
        raise RuntimeError("a secret")

    browser.app.open([(EMBEDDINGS, fail)])
    status, body = await browser.post("/v1/embeddings", _BODY, x_request_id="mine")
    assert status == 500
    assert body["error"]["message"] == "internal error; the server's log has it under request_id 'mine'"


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("br, gzip", True),
        ("GZIP;q=0.5", True),
        ("x-gzip", True),
        ("gzip ; q=0.01 , br", True),
        ("gzip;q=0", False),
        ("identity, gzip; q=0.000, br", False),
        ("notgzip", False),
    ],
)
async def test_what_is_large_is_compressed_for_those_who_take_it(accepted: str, is_compressed: bool) -> None:
    scores = [float(number) for number in range(20_000)]
    result = TaskResult(sentence_similarity=SentenceSimilarityResult(scores=scores))
    browser = Browser(_SPECS, lambda given: result)
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    headers = {"accept-encoding": accepted, "content-type": "application/json"}
    _, plain = await browser.post("/similarity", body)
    assert "content-encoding" not in browser.headers
    assert browser.headers["vary"] == "accept-encoding"
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    exchange = RecordedExchange("POST", "/similarity", fields, [orjson.dumps(body)])
    await browser.app(exchange)
    sent = exchange.sent
    assert ((b"content-encoding", b"gzip") in sent[0]["headers"]) is is_compressed
    answer = gzip.decompress(sent[1]["body"]) if is_compressed else sent[1]["body"]
    assert orjson.loads(answer) == plain == scores


async def test_while_it_drains_new_requests_are_refused_and_connections_end(browser: Browser) -> None:
    browser.in_flight.drain()
    browser.app.is_draining = True
    status, _ = await browser.post("/v1/embeddings", _BODY)
    assert (status, browser.headers["connection"], browser.headers["retry-after"]) == (503, "close", "1")


async def test_requests_are_counted_with_those_of_other_doors(browser: Browser) -> None:
    counts = []

    async def count(request: HttpRequest) -> HttpResponse:
        counts.append(browser.in_flight.count)
        return HttpResponse(b"{}")

    browser.app.open([(EMBEDDINGS, count)])
    await browser.post("/v1/embeddings", _BODY)
    assert (counts, browser.in_flight.count) == ([1], 0)


async def test_a_caller_who_leaves_takes_the_work_along(browser: Browser) -> None:
    began, ended, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(request: HttpRequest) -> HttpResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async def receive() -> None:
        await left.wait()

    browser.app.open([(EMBEDDINGS, wait)])
    exchange = RecordedExchange("POST", "/v1/embeddings", (), [orjson.dumps(_BODY)], receive=receive)
    answering = asyncio.create_task(browser.app(exchange))
    await began.wait()
    assert browser.in_flight.count == 1
    left.set()
    await answering
    assert ended.is_set()
    assert browser.in_flight.count == 0
    assert exchange.sent == []


async def test_a_request_that_is_cancelled_from_within_is_told_that_the_server_stops(browser: Browser) -> None:
    async def cancelled(request: HttpRequest) -> HttpResponse:
        raise asyncio.CancelledError

    browser.app.open([(EMBEDDINGS, cancelled)])
    status, body = await browser.post("/v1/embeddings", _BODY)
    assert (status, body["error"]["message"]) == (503, "the all service is stopping")


async def test_a_body_that_does_not_arrive_is_refused_where_the_memory_is_claimed(browser: Browser) -> None:
    # Of a budget for one body of the largest size, of which another caller's body has a part.
    browser.in_flight = InFlight("all", 1 << 20, 1 << 20)
    browser.app = App(browser.in_flight, 1 << 20)
    browser.app.open([(EMBEDDINGS, _empty)])
    exchange = RecordedExchange("POST", "/v1/embeddings", (), [b"[" * 900_000], is_whole=False)
    with browser.in_flight.arriving("other", lambda error: None) as has_come:
        has_come(1 << 19)
        await browser.app(exchange)
    assert exchange.sent[0]["status"] == 429
    assert (await browser.post("/v1/embeddings", _BODY))[0] == 200


class _Listener(RecordedExchange):
    """The caller of a stream, who stays until `left` is set; the stream ends with `ended`, or where it is not endless
    when `is_over` is set.
    """

    def __init__(
        self,
        app: App,
        method: str = "GET",
        *,
        is_endless: bool = True,
        tell: Callable[[NeuronpipeError], bytes] | None = None,
    ) -> None:
        self.left, self.ended, self.got = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_over = asyncio.Event()
        self.is_endless = is_endless
        self.tell = tell
        app.open([(Route("GET", "/stream", "parts", is_counted=not is_endless), self._stream)])
        super().__init__(method, "/stream", receive=self._receive)
        self.answering = asyncio.create_task(app(self))

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    async def _stream(self, request: HttpRequest) -> HttpResponse:
        async def parts() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one "
                yield b"two "
                await self.is_over.wait()
            finally:
                self.ended.set()

        return HttpResponse(b"", "text/event-stream", stream=parts(), is_endless=self.is_endless, last_event=self.tell)

    async def _receive(self) -> None:
        await self.left.wait()

    def record(self, message: dict[str, Any]) -> None:
        super().record(message)
        if message.get("body") == b"two ":
            self.got.set()


@pytest.fixture
def streaming() -> App:
    return App(InFlight("all", 1 << 20, 1 << 20), 1 << 20)


async def test_a_stream_is_sent_as_it_comes_and_ends_properly_when_the_process_drains(streaming: App) -> None:
    listener = _Listener(streaming)
    await listener.got.wait()
    assert listener.body == b"one two "
    assert b"content-length" not in dict(listener.sent[0]["headers"])
    streaming.drain()
    await listener.answering
    assert listener.ended.is_set()
    assert listener.sent[-1] == {"body": b""}


async def test_a_stream_ends_with_its_caller(streaming: App) -> None:
    listener = _Listener(streaming)
    await listener.got.wait()
    listener.left.set()
    await listener.answering
    assert listener.ended.is_set()
    assert listener.sent[-1]["more_body"] is True  # nothing is sent to nobody


async def test_a_stream_that_has_an_end_counts_until_then_and_is_not_ended_by_draining() -> None:
    in_flight = InFlight("all", 1 << 20, 1 << 20)
    app = App(in_flight, 1 << 20)
    listener = _Listener(app, is_endless=False)
    await listener.got.wait()
    app.drain()
    assert in_flight.count == 1
    listener.is_over.set()
    await listener.answering
    assert listener.sent[-1] == {"body": b""}
    assert in_flight.count == 0


async def test_a_stream_that_is_broken_off_has_no_end_that_looks_like_its_own() -> None:
    in_flight = InFlight("all", 1 << 20, 1 << 20)
    listener = _Listener(App(in_flight, 1 << 20), is_endless=False)
    await listener.got.wait()
    listener.answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listener.answering
    assert listener.ended.is_set()
    assert listener.sent[-1]["more_body"] is True
    assert in_flight.count == 0


async def test_a_stream_of_events_that_is_broken_off_ends_with_the_error() -> None:
    app = App(InFlight("all", 1 << 20, 1 << 20), 1 << 20)
    listener = _Listener(app, is_endless=False, tell=lambda error: error.message.encode())
    await listener.got.wait()
    listener.answering.cancel()
    await listener.answering
    assert listener.body == b"one two the all service is stopping"
    assert listener.sent[-1] == {"body": b""}


async def test_a_stream_that_is_asked_for_while_the_process_drains_is_empty(streaming: App) -> None:
    streaming.drain()
    listener = _Listener(streaming)
    await listener.answering
    assert listener.body == b""


async def test_the_head_of_a_stream_has_no_end_to_wait_for(streaming: App) -> None:
    listener = _Listener(streaming, "HEAD")
    await listener.answering
    assert listener.body == b""
    assert b"content-length" not in dict(listener.sent[0]["headers"])  # as GET (RFC 9110, 8.6)


async def _empty(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"{}")


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_text_has_a_limit_below_that_of_files(browser: Browser, is_packed: bool) -> None:
    browser.app = App(browser.in_flight, 1 << 20, max_body_bytes=1000)
    browser.app.open([(EMBEDDINGS, _empty)])
    data, headers = orjson.dumps(_BODY | {"input": "a" * 1000}), {}
    if is_packed:
        data, headers = gzip.compress(data), {"content-encoding": "gzip"}
    status, body = await browser.post("/v1/embeddings", data, **headers)
    expected = (413, "the body is larger than 1000 bytes, the limit (the gateway's max_input_bytes, times 8)")
    assert (status, body["error"]["message"]) == expected


@pytest.mark.parametrize(
    ("media_type", "status"), [("image/png", 404), ("", 413)], ids=["an image", "JSON all the same"]
)
async def test_a_file_has_the_limit_of_messages(browser: Browser, media_type: str, status: int) -> None:
    browser.app = App(browser.in_flight, 1 << 20, max_body_bytes=1000)
    browser.app.open([(MODEL, _not_found)])
    data = b"PNG" if media_type else b'{"inputs":"'
    headers = {"content-type": media_type} if media_type else {}
    assert (await browser.send("POST", "/models/small", data + b"a" * 2000, **headers))[0] == status


async def _not_found(request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"", "text/plain", status=404)


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'""', b'{"text":"a"}', b"[[[]]]"])
async def test_values_are_counted_before_they_are_made(value: bytes) -> None:
    browser = Browser(_SPECS, _answer, max_body_bytes=8 << 20)
    body = b'{"model":"small","stop":["a"],"input":[' + b",".join([value] * ((7 << 20) // (len(value) + 1))) + b"]}"
    status, answer = await browser.post("/v1/embeddings", body)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert "too many values" in answer["error"]["message"]


@pytest.mark.parametrize("text", [b"[,{:", b'\\"', b"\\\\", b'\\\\\\"'], ids=["marks", "quotes", "backslashes", "both"])
async def test_what_stands_in_a_text_is_no_value(text: bytes) -> None:
    browser = Browser(_SPECS, _answer, max_body_bytes=8 << 20, max_input_bytes=8 << 20)
    whole = text * ((4 << 20) // len(text))
    status, _ = await browser.post("/v1/embeddings", b'{"model":"small","input":["' + whole + b'","[]"]}')
    assert status == 200
    assert [input.sentence_embedding.text for input in browser.inputs] == [orjson.loads(b'"' + whole + b'"'), "[]"]


async def test_inputs_are_counted_before_they_are_made(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*given: Any, **options: Any) -> TaskInput:
        raise AssertionError("was made")

    monkeypatch.setattr("neuronpipe.doors.http.openai.embedding_input", make)
    status, body = await browser.post("/v1/embeddings", _BODY | {"input": ["a"] * 2049})
    expected = (400, "input: 2049 inputs, must be from 1 to 2048")
    assert (status, body["error"]["message"]) == expected


async def test_of_several_headers_of_a_name_the_first_counts(browser: Browser) -> None:
    fields = [(b"x-request-timeout-ms", b"1000"), (b"x-request-timeout-ms", b"no number")]
    exchange = RecordedExchange("POST", "/v1/embeddings", fields, [orjson.dumps(_BODY)])
    await browser.app(exchange)
    assert exchange.sent[0]["status"] == 200


_SITE = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "is_refused"),
    [
        ({}, False),
        ({"host": "127.0.0.1:8080"}, False),
        ({"host": "localhost:8080", "origin": "http://localhost:8080", "sec-fetch-site": "same-origin"}, False),
        ({"host": "[::1]:8080", "origin": "http://[::1]:8080"}, False),
        ({"host": "gateway.example"}, False),
        ({"host": "GATEWAY.example:80", "origin": "https://gateway.example"}, False),
        ({"host": "evil.example"}, True),
        ({"host": "127.0.0.1.evil.example:8080"}, True),
        ({"host": "localhost:8080", "origin": _SITE}, True),
        ({"host": "localhost:8080", "origin": "null"}, True),
        ({"host": "localhost:8080", "sec-fetch-site": "cross-site"}, True),
        ({"host": "localhost:8080", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, True),
    ],
)
async def test_pages_of_other_sites_may_not_call_where_no_key_is_needed(
    browser: Browser, headers: dict[str, str], is_refused: bool
) -> None:
    browser.app = App(browser.in_flight, 1 << 20, hosts={"gateway.example"})
    browser.app.open(browser.handlers)
    status, _ = await browser.post("/v1/embeddings", _BODY, **headers)
    assert status == (403 if is_refused else 200)
    assert len(browser.inputs) == (not is_refused)


async def test_a_link_of_another_site_may_lead_here(browser: Browser) -> None:
    browser.app = App(browser.in_flight, 1 << 20, hosts=())
    browser.app.open(browser.handlers)
    link = {"host": "anything", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await browser.get("/v1/models", **link))[0] == 200
    assert (await browser.get("/v1/models", **link | {"sec-fetch-mode": "no-cors"}))[0] == 403


_ORIGIN = "https://app.example"
_ASKS = {"origin": _ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def _with(browser: Browser, **options: Any) -> Browser:
    browser.app = App(browser.in_flight, 1 << 20, **options)
    browser.app.open(browser.handlers)
    return browser


@pytest.mark.parametrize("origins", [{_ORIGIN}, {"*"}])
async def test_a_page_of_an_origin_that_is_set_may_call(browser: Browser, origins: set[str]) -> None:
    _with(browser, cors_origins=origins, hosts=())
    assert (await browser.send("OPTIONS", "/v1/embeddings", b"", **_ASKS))[0] == 200
    assert browser.headers["access-control-allow-origin"] == _ORIGIN
    assert browser.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert browser.headers["access-control-allow-headers"] == "authorization"
    page = {"host": "gateway.example", "origin": _ORIGIN, "sec-fetch-site": "cross-site"}
    for path, status in (("/v1/embeddings", 200), ("/v1/unknown", 404)):
        assert (await browser.post(path, _BODY, **page))[0] == status
        assert (browser.headers["access-control-allow-origin"], browser.headers["vary"]) == (_ORIGIN, "origin")
        assert browser.headers["access-control-expose-headers"] == "*"


async def test_a_page_of_another_origin_may_not(browser: Browser) -> None:
    _with(browser, cors_origins={_ORIGIN}, hosts=())
    assert (await browser.send("OPTIONS", "/v1/embeddings", b"", **_ASKS | {"origin": _SITE}))[0] == 405
    assert "access-control-allow-origin" not in browser.headers
    assert (await browser.post("/v1/embeddings", _BODY, origin=_SITE, host="gateway.example"))[0] == 403
    assert (await browser.post("/v1/embeddings", _BODY))[0] == 200
    assert "access-control-allow-origin" not in browser.headers


async def test_without_the_setting_no_page_of_another_origin_may_read_an_answer(browser: Browser) -> None:
    assert (await browser.send("OPTIONS", "/v1/embeddings", b"", **_ASKS))[0] == 405
    await browser.post("/v1/embeddings", _BODY, origin=_ORIGIN)
    assert not [name for name in browser.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/a/b/v1/models", 200), ("/v1/models", 200), ("/a/v1/models", 404), ("/a/bc/v1/models", 404), ("/a/b/v1", 404)],
)
async def test_a_prefix_is_left_out_of_paths(browser: Browser, path: str, status: int) -> None:
    _with(browser, path_prefix="/a/b")
    assert (await browser.get(path))[0] == status


_IGNORED = "x-neuronpipe-ignored"


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/embeddings", {"input": "a", "user": "u", "metadata": {}}, "user, metadata"),
        ("/embed", {"inputs": "a", "session_id": "1"}, "session_id"),
        ("/models/small", {"inputs": "a", "parameters": {"padding": True}}, "padding"),
        ("/pipeline/feature-extraction/small", {"inputs": "a", "user": "u"}, "user"),
        ("/invocations", {"inputs": "a", "user": "u"}, "user"),
        ("/invocations", {"input": "a", "user": "u"}, "user"),
        ("/v1/rerank", {"query": "q", "documents": [{"text": "a", "Größe": 1}]}, "Gr%C3%B6%C3%9Fe"),
    ],
)
async def test_an_answer_names_the_fields_that_were_ignored_and_strict_makes_them_errors(
    path: str, body: dict[str, Any], ignored: str
) -> None:
    results: dict[str, Any] = {
        "sentence_embedding": SentenceEmbeddingResult(embedding=[1.0]),
        "feature_extraction": FeatureExtractionResult(shape=[1, 1], data=bytes(4)),
        "rerank": RerankResult(texts=[RankedText(index=0, score=1.0)]),
    }

    def answer(input: TaskInput) -> TaskResult:
        task: Any = input.WhichOneof("task")
        return TaskResult(**{task: results[task]})

    embedder = model_spec("sentence_embedding", also_answers=("feature_extraction",))
    browser = Browser([embedder, model_spec("rerank", name="ranker")], answer, "small,ranker")
    assert (await browser.post(path, body))[0] == 200
    assert browser.headers[_IGNORED] == ignored
    asked = len(browser.inputs)
    assert (await browser.post(path, body, neuronpipe_strict="true"))[0] == 400
    assert len(browser.inputs) == asked
    await browser.post("/v1/embeddings", {"input": "a"})
    assert _IGNORED not in browser.headers


_SAID = {"role": "user", "content": "a"}
_REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No.", "annotations": []}]}
_RESPONSE_REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
_TOOL = {"type": "function", "function": {"name": "look"}}
_LOOK = {"type": "function", "name": "look"}
_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [_LOOK]}
_ALLOWED_IN_A_CHAT = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_TOOL]}}


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        ("/v1/chat/completions", {"messages": [_REFUSAL, _SAID]}, "annotations"),
        ("/v1/chat/completions", {"messages": [_SAID], "tools": [_TOOL], "tool_choice": _TOOL}, None),
        ("/v1/chat/completions", {"messages": [_SAID], "tools": [_TOOL], "tool_choice": _ALLOWED_IN_A_CHAT}, None),
        ("/v1/responses", {"input": [_RESPONSE_REFUSAL, _SAID]}, None),
        ("/v1/responses", {"input": "a", "tools": [_LOOK], "tool_choice": _ALLOWED}, None),
    ],
)
async def test_a_field_of_one_of_several_kinds_is_not_ignored_for_the_others(
    path: str, body: dict[str, Any], ignored: str | None
) -> None:
    result = TaskResult(text_generation=TextGenerationResult(sequences=[GeneratedText(text="a")]))
    browser = Browser([model_spec("text_generation", chat_template="{{ tools }}")], lambda _: result)
    assert (await browser.post(path, body, neuronpipe_strict="false"))[0] == 200
    assert browser.headers.get(_IGNORED) == ignored


async def test_a_caller_may_have_every_unknown_field_ignored_and_named() -> None:
    result = TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[1.0]))
    browser = Browser([model_spec("sentence_embedding")], lambda _: result)
    body = {"input": "a", "foo\r\nbar": 1, "é" * 100: 2}
    assert (await browser.post("/v1/embeddings", body))[0] == 400
    assert (await browser.post("/v1/embeddings", body, neuronpipe_strict="false"))[0] == 200
    assert browser.headers[_IGNORED] == "foo%0D%0Abar, " + 64 * "%C3%A9"
    many = {"input": "a"} | {f"f{number}": 1 for number in range(100)}
    assert (await browser.post("/v1/embeddings", many, neuronpipe_strict="false"))[0] == 200
    assert browser.headers[_IGNORED].split(", ") == [*(f"f{number}" for number in range(32)), "..."]
    status, answer = await browser.post("/v1/embeddings", body, neuronpipe_strict="1")
    assert (status, answer["error"]["param"]) == (400, "neuronpipe-strict")


async def test_ignored_fields_of_a_body_that_a_thread_reads_are_named() -> None:
    result = TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[1.0]))
    browser = Browser([model_spec("sentence_embedding")], lambda _: result)
    assert (await browser.post("/v1/embeddings", {"input": "a" * 600_000, "user": "u"}))[0] == 200
    assert browser.headers[_IGNORED] == "user"
