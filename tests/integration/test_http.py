"""The HTTP door as a connection has it: limits, order, ends, and what both doors share."""

import gzip
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import Client
from tests.integration.http_server import Connection, HttpServer, post, running_http_server
from tests.suite.constants import constants

_EMBED = json.dumps({"model": "minilm", "input": "A fine day.", "dimensions": 2}).encode()
_SLOW = json.dumps({"inputs": "A fine day."}).encode()
_MAX_BODY_BYTES = 1 << 20

pytestmark = pytest.mark.local_only


@pytest.fixture
def connection(http_server: HttpServer) -> Iterator[Connection]:
    with http_server.connect() as connection:
        yield connection


def test_both_doors_give_the_same_vector(http_server: HttpServer, connection: Connection) -> None:
    connection.send(post("/v1/embeddings", json.dumps({"model": "minilm", "input": "A fine day."}).encode()))
    over_http = connection.receive().json["data"][0]["embedding"]
    with Client(http_server.process.target) as client:
        assert over_http == pytest.approx(client.embed("minilm", "A fine day.").tolist(), abs=1e-7)


def test_a_connection_is_kept(connection: Connection) -> None:
    for _ in range(3):
        connection.send(post("/v1/embeddings", _EMBED))
        assert connection.receive().status == 200


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


def test_http_1_0_is_answered_and_ended(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", _EMBED, version="1.0"))
    answer = connection.receive()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert connection.is_ended()


def test_a_body_in_chunks_is_taken(connection: Connection) -> None:
    head = (
        b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: "
        b"chunked\r\n\r\n"
    )
    chunks = [_EMBED[:10], _EMBED[10:]]
    connection.send(head + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n")
    assert connection.receive().status == 200


def test_a_body_that_says_it_is_enormous_is_refused_before_it_is_sent(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", b"").replace(b"content-length: 0", b"content-length: 100000000000"))
    answer = connection.receive()
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert answer.json["error"]["code"] == "content_too_large"


def test_a_caller_who_sends_an_enormous_body_all_the_same_gets_the_answer(connection: Connection) -> None:
    body = b" " * (80 << 20)  # the default limit is 64 MiB
    connection.send(post("/v1/embeddings", body))
    assert connection.receive().status == 413


def test_an_enormous_body_in_chunks_ends_at_the_limit(http_repository: Path) -> None:
    with (
        running_http_server(http_repository, environment=constants(max_message_bytes=_MAX_BODY_BYTES)) as server,
        server.connect() as connection,
    ):
        connection.send(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: "
            b"chunked\r\n\r\n"
        )
        chunk = b"%x\r\n%s\r\n" % (_MAX_BODY_BYTES // 4, b" " * (_MAX_BODY_BYTES // 4))
        for _ in range(5):
            connection.send(chunk)
        answer = connection.receive()
        assert (answer.status, answer.headers["connection"]) == (413, "close")


def test_expect_100_continue_is_answered_before_the_body(connection: Connection) -> None:
    request = post("/v1/embeddings", _EMBED, "expect: 100-continue")
    head = request[: -len(_EMBED)]
    connection.send(head)
    assert connection.receive().status == 100
    connection.send(_EMBED)
    assert connection.receive().status == 200


@pytest.mark.parametrize(
    "request_bytes", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"\x16\x03\x01\x02\x00"]
)
def test_what_is_no_http_is_told_so_and_ended(connection: Connection, request_bytes: bytes) -> None:
    connection.send(request_bytes)
    assert connection.receive().status == 400
    assert connection.is_ended()


def test_two_lengths_are_refused(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", _EMBED, "transfer-encoding: chunked"))
    assert connection.receive().status == 400
    assert connection.is_ended()


def test_a_head_without_end_is_refused(connection: Connection) -> None:
    connection.send(b"GET / HTTP/1.1\r\n")
    field = b"x-padding: " + b"a" * 8000 + b"\r\n"
    for _ in range(10):
        connection.send(field)
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


def test_answers_are_compressed_for_those_who_ask(connection: Connection) -> None:
    body = json.dumps({"model": "minilm", "input": ["A fine day."] * 40}).encode()
    connection.send(post("/v1/embeddings", body, "accept-encoding: gzip"))
    compressed = connection.receive()
    connection.send(post("/v1/embeddings", body))
    plain = connection.receive()
    assert compressed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(compressed.body) == plain.body
    assert len(compressed.body) < len(plain.body)


def test_metrics_are_on_the_same_port(connection: Connection) -> None:
    connection.send(post("/v1/embeddings", _EMBED))
    connection.receive()
    connection.send(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
    page = connection.receive()
    assert (page.status, page.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    assert "neuronpipe_request_duration_seconds_count{" in page.body.decode()
    connection.send(
        b"GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: application/openmetrics-text; version=1.0.0\r\n\r\n"
    )
    assert connection.receive().body.endswith(b"# EOF\n")


def test_a_health_check_needs_no_body(connection: Connection) -> None:
    for path in ("/health", "/ping"):
        connection.send(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert connection.receive().status == 200


@pytest.fixture
def slow_server(slow_repository: Path) -> Iterator[HttpServer]:
    with running_http_server(slow_repository) as server:
        yield server


def test_a_deadline_that_passes_is_504(slow_server: HttpServer) -> None:
    with slow_server.connect() as connection:
        connection.send(post("/models/classifier", _SLOW, "x-request-timeout-ms: 100"))
        answer = connection.receive()
    assert (answer.status, answer.json["error_type"]) == (504, "generation")


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


def test_a_gateway_over_other_processes_has_the_door_too(http_repository: Path) -> None:
    with four_processes(http_repository) as processes:
        targets = [
            f"--{name}-target={processes[service].target}"
            for name, service in (
                ("tokenizer", "tokenizer"),
                ("executor", "neuron-executor"),
                ("postprocessor", "postprocessor"),
            )
        ]
        with ServiceProcess(
            "gateway", "--repository", str(http_repository), *targets, "--http-listen", "127.0.0.1:0"
        ) as gateway:
            address = str(gateway.wait_for("listening for HTTP")["address"])
            gateway.wait_until_ready().wait_for("all stages reached")
            with Connection(address) as connection:
                connection.send(post("/v1/embeddings", _EMBED))
                assert connection.receive().status == 200
                processes["postprocessor"].stop()
                _wait_for_health(connection, 503)


def test_an_address_that_is_taken_is_named(http_server: HttpServer, http_repository: Path) -> None:
    taken = http_server.address
    with (
        ServiceProcess("all", "--repository", str(http_repository), "--http-listen", taken) as process,
        pytest.raises(RuntimeError, match=f"--http-listen: cannot listen on {taken}: Address already in use"),
    ):
        process.wait_until_ready()


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


def _wait_for_health(connection: Connection, status: int) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        connection.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        if connection.receive().status == status:
            return
        time.sleep(0.05)
    raise AssertionError(f"the health is not {status}")


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
