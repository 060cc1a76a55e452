"""The HTTP door as a connection has it: limits, order, ends, and what both doors share."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.processes import ServiceProcess
from tests.suite.constants import constants
from tests.systems.http_server import Connection, HttpServer, post, running_http_server

_EMBED = json.dumps({"model": "minilm", "input": "A fine day.", "dimensions": 2}).encode()
_SLOW = json.dumps({"inputs": "A fine day."}).encode()

pytestmark = pytest.mark.local_only


@pytest.fixture
def connection(http_server: HttpServer) -> Iterator[Connection]:
    with http_server.connect() as connection:
        yield connection


def test_requests_in_one_go_are_answered_in_their_order(connection: Connection) -> None:
    texts = ["one", "two", "three"]
    bodies = [
        json.dumps({"model": "minilm", "input": [text] * (number + 1), "dimensions": 1}).encode()
        for number, text in enumerate(texts)
    ]
    connection.send(
        b"".join(
            post("/v1/embeddings", body, f"x-request-id: {text}") for body, text in zip(bodies, texts, strict=True)
        )
    )
    answers = [connection.receive() for _ in texts]
    assert [answer.headers["x-request-id"] for answer in answers] == texts
    assert [len(answer.json["data"]) for answer in answers] == [1, 2, 3]


def test_a_body_that_was_refused_unread_does_not_disturb_the_next_request(connection: Connection) -> None:
    connection.send(post("/v1/unknown", _EMBED) + post("/v1/embeddings", _EMBED, media_type="text/plain"))
    connection.send(post("/v1/embeddings", _EMBED))
    assert [connection.receive().status for _ in range(3)] == [404, 415, 200]


_VERSION, _ID = "neuronpipe-version", "x-request-id"


@pytest.mark.parametrize(("header", "value"), [(_VERSION, "first"), (_VERSION, "1" * 300), (_ID, "a" * 300)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "minilm", "input": "one"}),
        ("/v1/embeddings", {"model": "minilm", "input": ["one", "two"]}),
        ("/predict", {"model": "classifier", "inputs": "one"}),
        ("/models/classifier", {"inputs": "one"}),
        ("/tokenize", {"model": "minilm", "inputs": "one"}),
    ],
)
def test_an_error_names_the_header_that_was_sent(
    path: str, body: dict[str, object], header: str, value: str, connection: Connection
) -> None:
    connection.send(post(path, json.dumps(body).encode(), f"{header}: {value}"))
    answer = connection.receive()
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["message"] if isinstance(error, dict) else error).startswith(f"{header}: ")


def test_http_1_0_is_answered_and_ended(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", _EMBED, version="1.0"))
    answer = connection.receive()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert connection.is_ended()


def test_a_caller_who_sends_an_enormous_body_all_the_same_gets_the_answer(connection: Connection) -> None:
    body = b" " * (80 << 20)  # the default limit is 64 MiB
    connection.send(post("/v1/embeddings", body))
    assert connection.receive().status == 413


@pytest.mark.parametrize(
    "request_bytes", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
def test_what_is_no_http_is_told_so_and_ended(connection: Connection, request_bytes: bytes) -> None:
    connection.send(request_bytes)
    assert connection.receive().status == 400
    assert connection.is_ended()


def test_a_caller_who_goes_on_sending_gets_its_refusal(connection: Connection) -> None:
    connection.send(b"GET / HTTP/1.1\r\nx-padding: " + b"a" * 80_000)
    for _ in range(20):
        connection.send(b"a" * 100_000)
        time.sleep(0.01)
    assert connection.receive().status == 400
    assert connection.is_ended()


def test_a_body_that_is_no_chunk_is_refused(connection: Connection) -> None:
    head = post("/v1/embeddings", b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    connection.send(head + b"5\r\nhello\r\nno length\r\n")
    assert connection.receive().status == 400
    assert connection.is_ended()


def test_a_request_is_answered_before_what_is_no_http_behind_it_ends_the_connection(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", _EMBED) + b"hello\r\n\r\n")
    answer = connection.receive()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert connection.is_ended()


@pytest.fixture
def slow_server(slow_repository: Path) -> Iterator[HttpServer]:
    with running_http_server(slow_repository) as server:
        yield server


def test_what_a_caller_left_is_not_computed(slow_server: HttpServer) -> None:
    with slow_server.connect() as first, slow_server.connect() as second, slow_server.connect() as other:
        first.send(post("/models/classifier", _SLOW))
        _pass_time(other)  # the first request is on the device by now
        second.send(post("/models/classifier", json.dumps({"inputs": "Another."}).encode()))
        _pass_time(other, 3)
        second.close()
        assert first.receive().status == 200
    slow_server.process.signal(signal.SIGTERM)
    assert slow_server.process.wait() == 0
    assert [line["sequences"] for line in slow_server.process.events() if line["event"] == "computed"] == [1]


def test_what_is_in_flight_is_answered_and_what_comes_late_is_told_to_retry(slow_server: HttpServer) -> None:
    with slow_server.connect() as busy, slow_server.connect() as late, slow_server.connect() as idle:
        busy.send(post("/models/classifier", _SLOW))
        # It has come in by now. It is computed for a second and a half, in which all of this happens.
        _pass_time(late, 3)
        _pass_time(idle, 1)
        slow_server.process.signal(signal.SIGTERM)
        _wait_until_refusing(slow_server)
        late.send(post("/models/classifier", _SLOW))
        refused = late.receive()
        answered = busy.receive()
        assert (refused.status, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
        assert (answered.status, answered.headers["connection"]) == (200, "close")
        assert idle.is_ended()
        assert slow_server.process.wait() == 0


def _pass_time(connection: Connection, round_trips: int = 100) -> None:
    """As many round trips as what was sent before them needs to get where it waits."""
    for _ in range(round_trips):
        connection.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.receive().status == 200


def _wait_until_refusing(server: HttpServer) -> None:
    """Returns once new requests are refused. The log line "draining" comes before: until none has come for a tenth of a
    second, the process takes requests (docs/decisions/0004-draining.md), so this asks less often.
    """
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        time.sleep(0.3)
        with server.connect() as connection:
            connection.send(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            if connection.receive().status != 200:
                return
    raise AssertionError("requests are not refused")


@pytest.mark.parametrize("sent", [0, 20], ids=["idle", "within a head"])
def test_a_request_that_came_while_the_process_stood_still_is_answered(fake_repository: Path, sent: int) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    limits = constants(max_handshake_s=1) if sent else {}
    options = ("--http-listen", "127.0.0.1:0", "--max-connection-idle-s", "1")
    with ServiceProcess("all", "--repository", str(fake_repository), *options, environment=limits) as process:
        host, port = str(process.wait_for("listening for HTTP")["address"]).rsplit(":", 1)
        process.wait_until_ready()
        for _ in range(3):
            with socket.create_connection((host, int(port)), 10) as caller:
                caller.sendall(head + head[:sent])
                assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
                time.sleep(0.3)  # the connection is idle now
                process.signal(signal.SIGSTOP)
                caller.sendall(head[sent:])
                time.sleep(1.2)
                process.signal(signal.SIGCONT)
                assert caller.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
