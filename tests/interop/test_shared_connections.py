"""Callers of gRPC's own client that share a connection, as behind a proxy: a slow one loses its call, and no other."""

import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.interop.echo_server import SERVICE
from tests.interop.run import Server, Tls, running_echo
from tests.suite.constants import constants

pytestmark = [pytest.mark.local_only]

_LIMIT_S = 20.0
_MAX_SEND_S = 1.0
# All that a connection may have at once.
_CALLS = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_echo(Tls(), environment=constants(max_send_s=_MAX_SEND_S)) as server:
        yield server


def _method(channel: grpc.Channel, kind: str, name: str) -> Any:
    return getattr(channel, kind)(f"/{SERVICE}/{name}")


def test_a_caller_who_does_not_read_loses_its_call_and_the_others_of_the_connection_are_answered(
    server: Server,
) -> None:
    with server.channel() as channel:
        echo = _method(channel, "unary_unary", "Echo")
        unread = _method(channel, "unary_stream", "Split")(json.dumps({"count": 1000, "size": 65_536}).encode())
        next(unread)
        ends_s = time.monotonic() + 2 * _MAX_SEND_S
        while time.monotonic() < ends_s:
            assert echo(b"a", timeout=_LIMIT_S) == b"a"
        with pytest.raises(grpc.RpcError) as caught:
            list(unread)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo(b"a", timeout=_LIMIT_S) == b"a"


def test_callers_whose_requests_the_server_does_not_read_hold_up_no_other(server: Server) -> None:
    # Windows that do not grow: then the server waits for these callers, and reads nothing more of them.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.process.target, options) as channel:
        echo, chat = _method(channel, "unary_unary", "Echo"), _method(channel, "stream_stream", "Chat")
        streams = [chat(iter([b"a" * 65_536] * 64)) for _ in range(40)]
        for _ in range(50):
            assert echo(b"a" * 200_000, timeout=_LIMIT_S) == b"a" * 200_000
            time.sleep(_MAX_SEND_S / 100)  # so that the streams are there for the first half
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("are_late", [True, False], ids=["deadlines", "cancelled"])
def test_calls_that_end_together_leave_the_others_of_the_connection_alone(server: Server, are_late: bool) -> None:
    with server.channel() as channel:
        slow = _method(channel, "unary_unary", "Slow")
        for _ in range(2):  # also those that take their places
            others = [slow.future(b'{"seconds": 3}', timeout=_LIMIT_S) for _ in range(20)]
            some = [slow.future(b'{"seconds": 60}', timeout=1.5 if are_late else _LIMIT_S) for _ in range(_CALLS)]
            time.sleep(1)  # in which they are begun
            if not are_late:
                for call in some:
                    call.cancel()
            assert [other.result() for other in others] == [b'{"seconds": 3}'] * len(others)
            assert {call.code().name for call in some} == {"DEADLINE_EXCEEDED" if are_late else "CANCELLED"}
