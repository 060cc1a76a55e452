"""rpc/health_check.py, and the command for containers: 0 where a server is serving, 1 where it is not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from neuronpipe import cli
from neuronpipe.core.errors import Unavailable
from neuronpipe.rpc.health_check import check_health

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Nothing listens on the discard port.
_NOWHERE = "127.0.0.1:9"


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def target(servicer: health.HealthServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def test_a_server_that_is_serving_passes(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _SERVING)
    check_health(target, "", 10)


def test_a_server_that_is_not_serving_is_unavailable(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _NOT_SERVING)
    with pytest.raises(Unavailable, match=f"^{target}: NOT_SERVING$"):
        check_health(target, "", 10)


def test_one_service_is_asked_for_by_its_name(servicer: health.HealthServicer, target: str) -> None:
    servicer.set("", _SERVING)
    servicer.set("one.Service", _NOT_SERVING)
    with pytest.raises(Unavailable, match=r"^one\.Service: NOT_SERVING$"):
        check_health(target, "one.Service", 10)


def test_a_service_that_the_server_does_not_have_is_unavailable(target: str) -> None:
    with pytest.raises(Unavailable, match=f"^{target} does not tell its health: NOT_FOUND$"):
        check_health(target, "no.Service", 10)


def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=f"^{_NOWHERE} does not tell its health: UNAVAILABLE$"):
        check_health(_NOWHERE, "", 10)


@pytest.mark.parametrize(("status", "code"), [(_SERVING, 0), (_NOT_SERVING, 1)])
def test_the_command_says_it_by_its_exit_code(
    servicer: health.HealthServicer, target: str, status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer.set("one.Service", status)
    try:
        cli.main(["health", "--target", target, "--service", "one.Service"])
        ended = 0
    except SystemExit as exit:
        ended = int(exit.code or 0)
    assert ended == code
    assert capsys.readouterr().err == ("" if code == 0 else "neuronpipe: UNAVAILABLE: one.Service: NOT_SERVING\n")
