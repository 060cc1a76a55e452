"""A gateway with stages in its own process, and processes that meet at unix sockets."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from demo.processes import ServiceProcess
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import Unavailable
from tests.callers.requests import classify
from tests.integration.processes.test_lifecycle import wait_for_health
from tests.suite.commands import run
from tests.systems.pipelines import two_processes

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture
def processes(fake_repository: Path) -> Iterator[dict[str, ServiceProcess]]:
    with two_processes(fake_repository) as started:
        yield started


def test_commands_take_unix_sockets(processes: dict[str, ServiceProcess]) -> None:
    target = processes["gateway"].target
    assert target.startswith("unix:/")
    for name, process in processes.items():
        service = "neuronpipe.api.v1.InferenceService" if name == "gateway" else "the process"
        assert run("health", "--target", process.target).stdout == f"{process.target}: {service} is serving\n"
    assert "classifier" in run("models", "--target", target).stdout
    text = json.dumps({"text_classification": {"text": "a"}})
    answer = json.loads(run("infer", "--target", target, "--model", "classifier", "--json", text).stdout)
    assert answer["result"]["text_classification"]["labels"]
    load = ("--model", "classifier", "--duration", "0.3", "--warm-up", "0", "--json", "-")
    figures = json.loads(run("load", "--target", target, *load).stdout)
    assert (figures["answers"] > 0, figures["errors"]) == (True, {})


async def test_a_killed_executor_is_found_again_at_its_socket_and_near_stages_stay(
    fake_repository: Path, processes: dict[str, ServiceProcess]
) -> None:
    gateway, executor = processes["gateway"].target, processes["neuron-executor"].target
    async with AsyncClient(gateway, retries=False) as client:
        await client.infer(classify("a"))
        processes["neuron-executor"].signal(signal.SIGKILL)
        await wait_for_health(gateway, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(Unavailable, match="the neuron-executor service cannot be reached"):
            await client.infer(classify("a"))
        assert run("health", "--target", gateway).stderr.endswith("; it does not reach: neuron-executor\n")
        # The file of its socket is still there.
        assert Path(executor.removeprefix("unix:")).is_socket()
        with ServiceProcess("neuron-executor", "--repository", str(fake_repository), "--listen", executor):
            await wait_for_health(gateway, health_pb2.HealthCheckResponse.SERVING)
            assert (await client.infer(classify("a"))).result.text_classification.labels


async def test_an_executor_inside_and_the_others_outside_is_a_pipeline_too(fake_repository: Path) -> None:
    repository = ("--repository", str(fake_repository))
    with (
        ServiceProcess("tokenizer", *repository) as tokenizer,
        ServiceProcess("postprocessor", *repository) as postprocessor,
    ):
        targets = ("--tokenizer-target", tokenizer.target, "--postprocessor-target", postprocessor.target)
        with ServiceProcess("all", *repository, *targets, "--cores", "1") as gateway:
            gateway.wait_until_ready().wait_for("all stages reached")
            async with AsyncClient(gateway.target, retries=False) as client:
                assert (await client.infer(classify("a"))).result.text_classification.labels
