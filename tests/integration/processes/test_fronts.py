"""`serve all --front-processes N`: several processes that are one service, whatever becomes of them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferStreamRequest, InferStreamResponse
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.names import Metrics, Spans
from tests.callers.metrics import metric, series_of
from tests.callers.requests import classify
from tests.callers.traced import TREE, ask_sampled
from tests.integration.processes.test_lifecycle import wait_for_health
from tests.integration.processes.test_trace import _trace
from tests.servers.collector import grpc_collector
from tests.suite.waiting import happens
from tests.systems.http_server import Connection, post

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_FRONTS = 2
# So many connections all go to one of two processes once in 2 ** 31 times.
_CLIENTS = 32
_LIMIT_S = 60
_LISTEN = ("--metrics-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")


class _Service:
    """A service with front processes."""

    def __init__(self, process: ServiceProcess) -> None:
        self.process = process
        self.target = process.wait_until_ready().target

    @property
    def fronts(self) -> list[psutil.Process]:
        """By their numbers."""
        opened = [line for line in self.process.events() if line["event"] == "a front process is open"]
        newest = {int(str(line["front"])): int(str(line["pid"])) for line in opened}
        return [psutil.Process(newest[number]) for number in sorted(newest)]

    def connections_of(self, front: psutil.Process) -> int:
        """Connections that callers have to a front process."""
        port = int(self.target.rpartition(":")[2])
        return sum(
            connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
            for connection in front.net_connections("tcp")
        )

    def count(self, series: str) -> int:
        """The sum of a counter's series."""
        return int(metric(self.process, series))

    async def wait_for_count(self, series: str, count: int) -> None:
        """Processes report every second."""
        async with asyncio.timeout(_LIMIT_S):
            while (found := self.count(series)) != count:
                assert found < count
                await asyncio.sleep(0.05)


@contextmanager
def _running(repository: Path, *options: str) -> Iterator[_Service]:
    arguments = ("--front-processes", str(_FRONTS), "--repository", str(repository), *_LISTEN, *options)
    # One that is killed leaves its folder behind.
    with (
        TemporaryDirectory(prefix="np-") as folder,
        ServiceProcess("all", *arguments, environment={"TMPDIR": folder}) as process,
    ):
        yield _Service(process)


@pytest.fixture(scope="module")
def service(fake_repository: Path) -> Iterator[_Service]:
    """One that stays as it is."""
    with _running(fake_repository) as started:
        yield started


@pytest.fixture
def broken(fake_repository: Path) -> Iterator[_Service]:
    """One that a test breaks."""
    with _running(fake_repository) as started:
        yield started


@asynccontextmanager
async def _clients(target: str, count: int = _CLIENTS) -> AsyncIterator[Sequence[Any]]:
    """Stubs, each with a connection of its own, which is open."""
    async with AsyncExitStack() as stack:
        channels = [
            # Channels of one process share a connection to an address unless they are told otherwise.
            await stack.enter_async_context(grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(count)
        ]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        yield [InferenceServiceStub(channel) for channel in channels]


async def _requests(*words: int) -> AsyncIterator[InferStreamRequest]:
    for count in words:
        yield InferStreamRequest(request=classify("word " * count, request_id=str(count)))


async def _wait_until_gone(processes: Sequence[psutil.Process]) -> None:
    await happens(
        lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    )


async def test_every_front_process_serves_at_the_one_address_and_metrics_add_up(service: _Service) -> None:
    async with _clients(service.target) as clients:
        assert all(service.connections_of(front) for front in service.fronts)
        assert sum(service.connections_of(front) for front in service.fronts) == _CLIENTS
        answers = await asyncio.gather(*(client.Infer(classify("a"), timeout=_LIMIT_S) for client in clients))
        assert len({answer.result.SerializeToString() for answer in answers}) == 1
        await service.wait_for_count("neuronpipe_request_duration_seconds_count", _CLIENTS)
        await service.wait_for_count("neuronpipe_item_duration_seconds_count", _CLIENTS)
        await service.wait_for_count("neuronpipe_batch_size_sum", _CLIENTS)
        assert series_of(service.process)["neuronpipe_request_in_flight"] == 0
    # One executor, with all the cores.
    assert len(psutil.Process(service.process.pid).children(recursive=True)) == _FRONTS


async def test_a_killed_front_process_costs_what_it_had_and_is_started_again(broken: _Service) -> None:
    victim, survivor = broken.fronts
    has_ended = asyncio.Event()
    codes: set[grpc.StatusCode] = set()
    disturbed: set[int] = set()
    answered = 0

    async def call(number: int, client: Any) -> None:
        nonlocal answered
        while not has_ended.is_set():
            try:
                await client.Infer(classify("a"), timeout=_LIMIT_S)
                answered += 1
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
                disturbed.add(number)
                # Until its channel has connected again, which may first reach the end of the same process.
                await asyncio.sleep(0.01)

    async with _clients(broken.target) as clients:
        lost = broken.connections_of(victim)
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(call(number, client))
            await happens(lambda: answered >= 10 * _CLIENTS)
            victim.kill()
            await asyncio.to_thread(broken.process.wait_for, "a front process is open", _FRONTS + 1)
            before = answered
            await happens(lambda: answered >= before + 10 * _CLIENTS)
            has_ended.set()
        assert codes <= {grpc.StatusCode.UNAVAILABLE}
        assert len(disturbed) <= lost < _CLIENTS
        ended = broken.process.wait_for("a front process ended; another takes its place")
        assert (ended["front"], ended["code"]) == (1, -signal.SIGKILL)
        assert survivor in broken.fronts
        async with _clients(broken.target):
            assert all(broken.connections_of(front) for front in broken.fronts)
    # What the victim had answered is still counted, but for what it had not reported yet.
    await happens(lambda: broken.count("neuronpipe_request_duration_seconds_count") >= answered - before)


async def test_a_front_process_that_is_told_to_end_drains_and_is_replaced(broken: _Service) -> None:
    broken.fronts[1].terminate()
    ended = broken.process.wait_for("a front process ended; another takes its place")
    assert (ended["front"], ended["code"]) == (2, 0)
    broken.process.wait_for("a front process is open", _FRONTS + 1)
    async with _clients(broken.target) as clients:
        assert all(broken.connections_of(front) for front in broken.fronts)
        await asyncio.gather(*(client.Infer(classify("a"), timeout=_LIMIT_S) for client in clients))


async def test_no_front_process_outlives_the_one_that_started_it(broken: _Service) -> None:
    fronts = broken.fronts
    fronts[1].suspend()  # hung: nothing of its own could end it
    broken.process.signal(signal.SIGKILL)
    assert broken.process.wait() == -signal.SIGKILL
    await _wait_until_gone(fronts)


def test_a_front_process_whose_parent_is_gone_already_ends() -> None:
    command = [sys.executable, "-m", "neuronpipe.cli.front", "1", str(os.getppid())]  # not who starts it
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, "")


async def test_sigterm_drains_all_front_processes(slow_repository: Path) -> None:
    with _running(slow_repository) as service:
        process, fronts = service.process, service.fronts
        async with _clients(service.target, 8) as clients, AsyncClient(service.target, retries=False) as late:
            await late.list_models()
            streams = [aiter(client.InferStream(_requests(1, 2, 3), timeout=_LIMIT_S)) for client in clients]
            firsts = await asyncio.gather(*(anext(stream) for stream in streams))
            process.signal(signal.SIGTERM)
            process.wait_for("draining")
            answers: list[list[InferStreamResponse]] = [[first] for first in firsts]
            for found, stream in zip(answers, streams, strict=True):
                found += [answer async for answer in stream]
            assert process.wait() == 0
            with pytest.raises(Unavailable):
                await late.infer(classify("a"))
        for found in answers:
            assert {answer.request_id for answer in found} == {"1", "2", "3"}
            assert {answer.outcome.WhichOneof("outcome") for answer in found} == {"response"}
        await _wait_until_gone(fronts)
        assert [line["event"] for line in process.events() if line["level"] != "info"] == []


async def test_grace_limits_how_long_the_fronts_take(slow_repository: Path) -> None:
    with _running(slow_repository, "--grace-s", "0.1") as service:
        process, fronts = service.process, service.fronts
        async with AsyncClient(service.target, retries=False) as client:
            answers = client.infer_stream([classify("word " * count, request_id=str(count)) for count in (1, 500)])
            await anext(answers)
            process.signal(signal.SIGTERM)
            assert process.wait(timeout_s=10) == 0
        await _wait_until_gone(fronts)


async def test_health_is_that_of_the_service(service: _Service) -> None:
    await wait_for_health(service.target, health_pb2.HealthCheckResponse.SERVING)
    await wait_for_health(service.target, health_pb2.HealthCheckResponse.SERVING, "neuron-executor")


async def test_the_http_door_is_shared_too(service: _Service) -> None:
    address = str(service.process.wait_for("listening for HTTP")["address"])
    for _ in range(_CLIENTS):
        with Connection(address) as connection:
            connection.send(post("/v1/embeddings", b'{"model": "minilm", "input": "a"}'))
            assert len(connection.receive().json["data"][0]["embedding"]) > 0


async def test_traces_and_metrics_of_all_are_exported_as_those_of_one_service(fake_repository: Path) -> None:
    with grpc_collector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
        }
        options = ("--repository", str(fake_repository), "--front-processes", str(_FRONTS))
        with ServiceProcess("all", *options, environment=environment) as process:
            target = process.wait_until_ready().target
            for _ in range(8):
                (answered,) = await ask_sampled(target, [classify("a")])
            collector.wait_until(lambda found: len(found.trace(answered.trace_id)) >= 7)
            names = sorted(span.name for span in collector.trace(answered.trace_id))
            assert names == sorted((*TREE["gateway"], *TREE["neuron-executor"]))
            assert {span.service for span in collector.trace(answered.trace_id)} == {"all"}

            def requests(found: object) -> bool:
                points = collector.points.get(("all", Metrics.REQUEST_DURATION.name), [])
                return sum(int(point.count) for point in points) == 8

            await asyncio.to_thread(collector.wait_until, requests)


def test_a_kept_trace_has_the_spans_of_its_front_process_and_of_the_executor(fake_repository: Path) -> None:
    options = ("--repository", str(fake_repository), "--front-processes", "2", "--kept-traces", "50")
    with ServiceProcess("all", *options) as process:
        done = _trace(process.wait_until_ready().target)
    assert done.returncode == 0, done.stderr
    assert {"Infer", Spans.PREPROCESS, "Execute", Spans.QUEUE, Spans.COMPUTE} <= set(done.stdout.split())
