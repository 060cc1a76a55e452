"""Processes that start, stop, die and come back. These tests break what they started, so they never run against
--target.
"""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import Unavailable
from neuronpipe.rpc.client import open_channel
from tests.callers.requests import classify
from tests.servers.ports import free_port
from tests.suite.commands import run

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

INFERENCE_SERVICE = "neuronpipe.api.v1.InferenceService"
OPTIONS = {
    "tokenizer": "--tokenizer-target",
    "neuron-executor": "--executor-target",
    "postprocessor": "--postprocessor-target",
}


async def wait_for_health(
    target: str, status: "health_pb2.HealthCheckResponse.ServingStatus", service: str = INFERENCE_SERVICE
) -> None:
    """Follows a service's health until it is the one asked for; the test's time limit is the only other end."""
    async with open_channel(target) as channel:
        async for response in health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service), wait_for_ready=True
        ):
            if response.status == status:
                return
    raise AssertionError("the watch ended")


@pytest.mark.parametrize("missing", OPTIONS)
async def test_gateway_waits_for_a_stage_that_is_down_at_start(fake_repository: Path, missing: str) -> None:
    repository = ("--repository", str(fake_repository))
    address = f"127.0.0.1:{free_port()}"
    stages = [ServiceProcess(service, *repository) for service in OPTIONS if service != missing]
    try:
        targets = {stage.service: stage.wait_until_ready().target for stage in stages} | {missing: address}
        with ServiceProcess(
            "gateway", *repository, *(f"{OPTIONS[service]}={targets[service]}" for service in OPTIONS)
        ) as gateway:
            gateway.wait_until_ready()
            async with AsyncClient(gateway.target, retries=False) as client:
                with pytest.raises(Unavailable, match=f"the {missing} service cannot be reached"):
                    await client.infer(classify("a"))
                stages.append(ServiceProcess(missing, *repository, "--listen", address))
                await wait_for_health(gateway.target, health_pb2.HealthCheckResponse.SERVING)
                assert (await client.infer(classify("a"))).result.text_classification.labels
    finally:
        for stage in stages:
            stage.stop()


@pytest.mark.parametrize("victim", OPTIONS)
async def test_request_fails_as_unavailable_when_its_stage_dies_and_the_gateway_recovers(
    fake_repository: Path, victim: str
) -> None:
    with four_processes(fake_repository) as processes:
        gateway, address = processes["gateway"].target, processes[victim].target
        async with AsyncClient(gateway, retries=False) as client:
            await client.infer(classify("a"))
            # Frozen, it keeps the request that comes in; and while other calls go through the gateway, the request gets
            # there.
            processes[victim].signal(signal.SIGSTOP)
            inside = asyncio.create_task(client.infer(classify("a")))
            for _ in range(50):
                await client.list_models()
            assert not inside.done()
            processes[victim].signal(signal.SIGKILL)
            with pytest.raises(Unavailable, match=f"the {victim} service cannot be reached"):
                await inside

            await wait_for_health(gateway, health_pb2.HealthCheckResponse.NOT_SERVING)
            with pytest.raises(Unavailable, match=f"the {victim} service cannot be reached"):
                await client.infer(classify("a"))
            with ServiceProcess(victim, "--repository", str(fake_repository), "--listen", address):
                await wait_for_health(gateway, health_pb2.HealthCheckResponse.SERVING)
                assert (await client.infer(classify("a"))).result.text_classification.labels


async def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(slow_repository: Path) -> None:
    with ServiceProcess("all", "--repository", str(slow_repository)) as process:
        target = process.wait_until_ready().target
        async with AsyncClient(target, retries=False) as client, AsyncClient(target, retries=False) as late:
            await late.list_models()
            in_flight = client.infer_stream([classify("word " * count, request_id=str(count)) for count in range(1, 4)])
            first = await anext(in_flight)
            # All three came in one stream and fit one batch or two; with one answered the stream is certain to be
            # inside.
            process.signal(signal.SIGTERM)
            await _wait_until_refused(late)
            with pytest.raises(Unavailable):
                await late.infer(classify("a"))
            rest = [answer async for answer in in_flight]

        assert {answer.request_id for answer in [first, *rest]} == {"1", "2", "3"}
        assert {answer.outcome.WhichOneof("outcome") for answer in [first, *rest]} == {"response"}
        assert process.wait() == 0
        assert process.wait_for("stopped")


async def _wait_until_refused(client: AsyncClient) -> None:
    """Returns once calls are refused. The log line "draining" comes before: until its parts have been told, the process
    takes calls (docs/decisions/0004-draining.md).
    """
    with suppress(Unavailable):
        while True:
            await client.list_models()


async def test_sigterm_finishes_a_unary_call_across_four_processes(slow_repository: Path) -> None:
    with four_processes(slow_repository) as processes:
        target = processes["gateway"].target
        async with AsyncClient(target, retries=False) as client:
            outcomes = client.infer_stream(
                [classify("first", request_id="1"), classify("second " * 400, request_id="2")]
            )
            await anext(outcomes)
            for process in processes.values():
                process.signal(signal.SIGTERM)
            for process in processes.values():
                process.wait_for("draining")
            rest = [answer.outcome async for answer in outcomes]

        # Each stage finishes the call that it holds; the next stage of the pipeline may refuse it by then.
        assert len(rest) <= 1
        for outcome in rest:
            if outcome.WhichOneof("outcome") != "response":
                assert "cannot be reached" in outcome.error.message
        assert [process.wait() for process in processes.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "neuron-executor", "postprocessor", "all"])
def test_missing_repository_is_said_at_start(tmp_path: Path, service: str) -> None:
    result = serve(service, "--repository", str(tmp_path / "nowhere"))

    assert result.returncode == 2
    assert f"neuronpipe: {tmp_path / 'nowhere'}: no such folder" in result.stderr
    assert "listening" not in result.stderr


# What each service reads of a bundle besides its manifest.
TAMPERED = {"neuron-executor": "artifacts/openvino/model.bin", "tokenizer": "tokenizer.json", "all": "tokenizer.json"}


@pytest.mark.parametrize("service", TAMPERED)
def test_tampered_bundle_is_refused_at_start(repository: Path, tmp_path: Path, service: str) -> None:
    # The first bundle is sound, so that the second is found while a model is already loaded.
    shutil.copytree(repository / "answerer", tmp_path / "answerer")
    shutil.copytree(repository / "classifier", tmp_path / "classifier")
    file = tmp_path / "classifier/1" / TAMPERED[service]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    result = serve(service, "--repository", str(tmp_path))

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"neuronpipe: {file}: changed since it was compiled (its sha256 is not the manifest's); compile the model again"
    )
    assert "Traceback" not in result.stderr


async def test_idle_stream_does_not_hold_up_the_end(slow_repository: Path) -> None:
    release = asyncio.Event()

    async def requests() -> AsyncIterator[InferRequest]:
        yield classify("a", request_id="1")
        await release.wait()

    with ServiceProcess("all", "--repository", str(slow_repository), "--grace-s", "60") as process:
        async with AsyncClient(process.wait_until_ready().target, retries=False) as client:
            answers = client.infer_stream(requests())
            first = await anext(answers)
            process.signal(signal.SIGTERM)
            with pytest.raises(Unavailable, match="the all service is stopping"):
                await anext(answers)
            release.set()

        assert first.request_id == "1"
        assert process.wait(timeout_s=20) == 0


def serve(service: str, *options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A service that is expected to end by itself."""
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
    return run("serve", service, *listen, *options, environment=environment)
