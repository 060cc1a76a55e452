"""serve/fronts.py: a port that processes of one service share, and no others."""

import socket

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.serve.fronts import shared_port


def _listener(address: str) -> socket.socket:
    """As each process of the service opens it."""
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)), reuse_port=True)


def test_a_free_port_is_chosen_once_and_all_processes_can_listen_on_it() -> None:
    with shared_port("--listen", "127.0.0.1:0") as port:
        assert port.address.startswith("127.0.0.1:")
        assert not port.address.endswith(":0")
        with _listener(port.address), _listener(port.address):
            pass


def test_connections_go_to_those_that_listen_not_to_who_keeps_the_port() -> None:
    with shared_port("--listen", "127.0.0.1:0") as port, _listener(port.address) as listener:
        listener.settimeout(10)
        for _ in range(20):
            with socket.create_connection(listener.getsockname(), timeout=10):
                listener.accept()[0].close()


def test_every_address_of_a_name_is_kept() -> None:
    with shared_port("--listen", "localhost:0") as port:
        number = int(port.address.rpartition(":")[2])
        for *_, where in socket.getaddrinfo("localhost", number, type=socket.SOCK_STREAM):
            family = socket.AF_INET6 if len(where) == 4 else socket.AF_INET
            with socket.socket(family) as probe, pytest.raises(OSError, match="Address already in use"):
                probe.bind(where)


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_that_another_service_listens_on_is_refused(reuse_port: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=reuse_port) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        problem = f"^--listen: cannot listen on {address}: Address already in use$"
        with pytest.raises(SetupError, match=problem), shared_port("--listen", address):
            pass


def test_a_service_that_took_the_port_in_the_meantime_is_noticed() -> None:
    with shared_port("--listen", "127.0.0.1:0") as port:
        port.check_unused()
        with _listener(port.address), pytest.raises(SetupError, match=r"Address already in use$"):
            port.check_unused()


def test_no_address_is_no_port() -> None:
    with shared_port("--listen", "") as port:
        assert port.address == ""
        port.check_unused()


def test_a_name_that_does_not_exist_is_named() -> None:
    problem = r"^--listen: cannot listen on name\.invalid:50050: ."
    with pytest.raises(SetupError, match=problem), shared_port("--listen", "name.invalid:50050"):
        pass
