"""A gateway whose executor is absent: it holds requests within limits, and tells KEDA's scaler that they are there."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.keda.v1 import external_scaler_pb2 as keda
from neuronpipe.api.keda.v1.external_scaler_pb2_grpc import ExternalScalerStub
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.callers.metrics import metric
from tests.callers.requests import classify
from tests.servers.ports import free_port
from tests.suite.constants import constants
from tests.suite.waiting import until

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

# A process that ends waits for requests that it holds, if it waits for them, longer than a test does.
_HOLDS = ("--max-held-requests", "2", "--metrics-listen", "127.0.0.1:0", "--grace-s", "300")
_LIMIT_S = 30.0


@pytest.fixture
def executor_target() -> str:
    return f"127.0.0.1:{free_port()}"


@contextmanager
def running_gateway(
    repository: Path, executor_target: str, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[ServiceProcess]:
    """A gateway with the other stages in its process, ready."""
    near = ("--tokenizer-target", "local", "--postprocessor-target", "local", "--executor-target", executor_target)
    with ServiceProcess(
        "gateway", "--repository", str(repository), *near, *options, environment=environment
    ) as gateway:
        yield gateway.wait_until_ready()


@contextmanager
def running_executor(repository: Path, target: str) -> Iterator[ServiceProcess]:
    with ServiceProcess("neuron-executor", "--repository", str(repository), "--listen", target) as executor:
        yield executor


@asynccontextmanager
async def client_of(gateway: ServiceProcess) -> AsyncIterator[AsyncClient]:
    """A client that asks once: what fails, fails."""
    async with AsyncClient(gateway.target, timeout_s=_LIMIT_S, retries=False) as client:
        yield client


async def wait_until_held(gateway: ServiceProcess, count: int) -> None:
    """Waits until the gateway holds so many requests."""
    await asyncio.to_thread(until, lambda: metric(gateway, "neuronpipe_held_requests") == count)


async def held(client: AsyncClient, gateway: ServiceProcess, *texts: str) -> "list[asyncio.Task[InferResponse]]":
    """Requests that the gateway holds."""
    tasks = [asyncio.create_task(client.infer(classify(text))) for text in texts]
    await wait_until_held(gateway, len(texts))
    return tasks


async def test_a_request_is_held_until_its_executor_has_started(fake_repository: Path, executor_target: str) -> None:
    with running_gateway(fake_repository, executor_target, *_HOLDS) as gateway:
        async with client_of(gateway) as client:
            (task,) = await held(client, gateway, "a")
            await asyncio.sleep(0.4)
            with running_executor(fake_repository, executor_target):
                times = (await task).timings
                assert times.held_ns >= 0.4e9
                assert times.held_ns <= times.predict_ns
                assert times.preprocess_ns + times.predict_ns + times.postprocess_ns <= times.total_ns
                assert (await client.infer(classify("b"))).timings.held_ns == 0
            (task,) = await held(client, gateway, "c")  # and again, when it has gone
            with running_executor(fake_repository, executor_target):
                assert (await task).timings.held_ns > 0


async def test_limits_and_deadlines_end_what_is_held(fake_repository: Path, executor_target: str) -> None:
    with running_gateway(fake_repository, executor_target, *_HOLDS) as gateway:
        async with client_of(gateway) as client:
            tasks = await held(client, gateway, "a", "b")
            with pytest.raises(Overloaded, match=r"2 requests are held until a process of the neuron-executor") as full:
                await client.infer(classify("c"))
            assert full.value.retry_after_s == 1
            tasks.pop().cancel()
            await wait_until_held(gateway, 1)
            # The gateway's own message, unless the client's clock is first.
            with pytest.raises(DeadlineExceeded):
                await client.infer(classify("d"), timeout_s=0.5)
            gateway.signal(signal.SIGTERM)
            with pytest.raises(Unavailable, match="the gateway is stopping"):
                await tasks[0]


async def test_a_deadline_that_passes_names_the_service_that_is_absent(
    fake_repository: Path, executor_target: str
) -> None:
    with running_gateway(fake_repository, executor_target, *_HOLDS, "--max-request-s", "0.3") as gateway:
        async with client_of(gateway) as client:
            with pytest.raises(DeadlineExceeded, match="no process of the neuron-executor service has model"):
                await client.infer(classify("a"))


async def test_the_scaler_tells_keda_when_executors_are_needed(fake_repository: Path, executor_target: str) -> None:
    scaler = f"127.0.0.1:{free_port()}"
    options = (*_HOLDS, "--scaler-listen", scaler)
    environment = constants(scaler_idle_s=0.5)
    with running_gateway(fake_repository, executor_target, *options, environment=environment) as gateway:
        async with client_of(gateway) as client, grpc.aio.insecure_channel(scaler) as channel:
            stub: Any = ExternalScalerStub(channel)
            reference = keda.ScaledObjectRef(scalerMetadata={"requestsPerPod": "4"})
            changes = stub.StreamIsActive(reference)
            async with asyncio.timeout(_LIMIT_S):
                assert (await changes.read()).result is False
                (task,) = await held(client, gateway, "a")
                assert (await changes.read()).result is True
                (spec,) = (await stub.GetMetricSpec(reference)).metricSpecs
                assert (spec.metricName, spec.targetSizeFloat) == ("neuronpipe-requests", 4.0)
                (value,) = (await stub.GetMetrics(keda.GetMetricsRequest(metricName=spec.metricName))).metricValues
                assert value.metricValueFloat == 1
                with running_executor(fake_repository, executor_target):
                    await task
                    assert (await changes.read()).result is False
            gateway.signal(signal.SIGTERM)
            assert gateway.wait() == 0  # an open stream of KEDA's does not delay it
