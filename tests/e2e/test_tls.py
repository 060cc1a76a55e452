"""The stack with the layer tls: the same answers, over mTLS on every hop, while certificates are made anew."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from neuronpipe.client import AsyncClient, Client, TlsFiles
from neuronpipe.core.errors import Unavailable
from tests.callers.requests import classify
from tests.callers.traced import ask_sampled
from tests.e2e.load import TEXTS, ask
from tests.e2e.stack import ROOT, SERVICES, Container, Stack, wait_until


@pytest.fixture(scope="module")
def caller(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a caller's files, while the stack has TLS."""
    folder = tmp_path_factory.mktemp("caller")
    with stack.with_tls():
        stack.make("caller-certificates", f"CALLER_CERTIFICATES={folder}")
        yield folder


def _files(folder: Path) -> TlsFiles:
    return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


def test_the_behaviour_suite_passes(stack: Stack, caller: Path) -> None:
    suite = ["tests/integration/doors/test_behaviour.py", f"--target={stack.target}", f"--target-tls={caller}"]
    command = [sys.executable, "-m", "pytest", *suite, "-q", "--timeout", "300"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


async def test_a_caller_without_a_certificate_gets_no_answer(stack: Stack, caller: Path) -> None:
    for tls in (None, TlsFiles(ca=caller / "ca.crt")):
        async with AsyncClient(stack.target, tls=tls, retries=False) as client:
            with pytest.raises(Unavailable):
                await client.list_models()


async def test_certificates_are_made_anew_under_load_and_no_call_fails(stack: Stack, caller: Path) -> None:
    answers = 0

    async def call(client: AsyncClient) -> None:
        nonlocal answers
        while not made.done() or answers < 200:
            await ask(client, TEXTS[answers % len(TEXTS)])
            answers += 1

    async with AsyncClient(stack.target, tls=_files(caller), retries=False) as client:
        made = asyncio.create_task(asyncio.to_thread(stack.make, "certificates", f"CALLER_CERTIFICATES={caller}"))
        await asyncio.gather(made, *(call(client) for _ in range(4)))
    for service in SERVICES:
        [container] = stack.containers(service)
        wait_until(f"{service} uses its new files", partial(_uses_new_files, stack, container))


def _uses_new_files(stack: Stack, container: Container) -> bool:
    return "changed files are used" in stack.logs(container.id)


def test_prometheus_reads_the_metrics_of_every_service(stack: Stack, caller: Path) -> None:
    def all_up() -> bool:
        with urllib.request.urlopen(
            f"{stack.url('prometheus')}/api/v1/query?query=neuronpipe_tls_files_rejected"
        ) as response:
            series = json.load(response)["data"]["result"]
        return {sample["metric"]["job"] for sample in series} == set(SERVICES)

    wait_until("all services are scraped", all_up)


async def test_spans_are_exported(stack: Stack, caller: Path) -> None:
    [answered] = await ask_sampled(stack.target, [classify("a text")], tls=_files(caller))

    def arrived() -> bool:
        with urllib.request.urlopen(f"{stack.url('jaeger')}/{answered.trace_id}") as response:
            return {span["service"] for span in json.load(response)} == set(SERVICES)

    wait_until("spans of every service", arrived, 30)


def test_redis_is_used(stack: Stack, caller: Path) -> None:
    [redis] = stack.containers("redis")
    options = ["--tls", "--cacert", "/tls/ca.crt", "--cert", "/tls/tls.crt", "--key", "/tls/tls.key"]
    assert int(stack.docker("exec", redis.id, "redis-cli", *options, "DBSIZE").split()[-1]) > 0


def test_a_job_is_answered(stack: Stack, caller: Path) -> None:
    with stack.with_jobs(), Client(stack.target, tls=_files(caller)) as client:
        request = classify("a fine day")
        (outcome,) = client.submit([request]).wait(60)
        assert outcome.response.result == client.infer(request).result
