"""rpc/connections.py: the connections of a port."""

import socket
from pathlib import Path

import pytest
from neuronpipe.rpc.connections import count_connections, end_connection, peer_address


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:1234", ("127.0.0.1", 1234)),
        ("ipv6:%5B::1%5D:1234", ("::1", 1234)),
        ("unix:", None),
        ("unix:/tmp/a.sock", None),
    ],
)
def test_a_peer_is_read_as_grpc_writes_it(peer: str, address: tuple[str, int] | None) -> None:
    assert peer_address(peer) == address


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_connections_are_counted_and_one_is_ended(family: socket.AddressFamily, host: str) -> None:
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2], timeout=10) as first,
        socket.create_connection(listener.getsockname()[:2], timeout=10) as second,
        listener.accept()[0],
        listener.accept()[0] as others,
    ):
        port = listener.getsockname()[1]
        before = count_connections(port)
        name = f"[{host}]" if ":" in host else host
        end_connection(port, f"ipv{6 if ':' in host else 4}:{name}:{first.getsockname()[1]}")
        assert before == 2
        assert first.recv(1) == b""
        others.sendall(b"x")
        assert second.recv(1) == b"x"


def test_looking_leaves_no_file_open() -> None:
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    for _ in range(100):
        count_connections(1)
    assert len(list(files.iterdir())) < before + 50  # other threads may have opened some
