"""Token cache and result cache through services, with a Redis that they share and that goes wrong under load."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import CacheControl, CacheOutcome, InferRequest, InferResponse
from neuronpipe.client import AsyncClient
from tests.callers.requests import classify
from tests.servers.redis import RedisServer, redis_server
from tests.suite.constants import constants
from tests.suite.waiting import happens

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_MEMORY, _REDIS, _MISS, _BYPASS = (
    CacheOutcome.CACHE_OUTCOME_HIT_MEMORY,
    CacheOutcome.CACHE_OUTCOME_HIT_REDIS,
    CacheOutcome.CACHE_OUTCOME_MISS,
    CacheOutcome.CACHE_OUTCOME_BYPASS,
)
_ONLY_REDIS = ("--token-cache-bytes", "0", "--token-cache-redis", "always")
# A busy machine answers late.
_PATIENT = constants(redis_timeout_ms=100)
# A wait for what comes in the end, however busy the machine is.
_LIMIT_S = 100.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def _until(
    client: AsyncClient, request: InferRequest, field: str, outcome: "CacheOutcome.ValueType"
) -> InferResponse:
    """Asks until the outcome comes: Redis is connected, and written to, beside the requests."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            response = await client.infer(request)
            if getattr(response.usage, field) == outcome:
                return response
            await asyncio.sleep(0.02)


def _gateway(
    stack: ExitStack, repository: Path, redis: RedisServer, stages: dict[str, ServiceProcess]
) -> ServiceProcess:
    """A gateway and a tokenizer of its own, before the other stages that there are."""
    options = ("--repository", str(repository))
    tokenizer = stack.enter_context(
        ServiceProcess("tokenizer", *options, "--redis-url", redis.url, *_ONLY_REDIS, environment=_PATIENT)
    ).wait_until_ready()
    targets = {"tokenizer": tokenizer, "executor": stages["neuron-executor"], "postprocessor": stages["postprocessor"]}
    gateway = ServiceProcess(
        "gateway", *options, *(f"--{name}-target={stage.target}" for name, stage in targets.items())
    )
    stack.enter_context(gateway).wait_until_ready().wait_for("all stages reached")
    return gateway


async def test_two_tokenizer_processes_share_what_either_tokenized(fake_repository: Path, redis: RedisServer) -> None:
    with ExitStack() as stack:
        stages = stack.enter_context(four_processes(fake_repository))
        first, second = (_gateway(stack, fake_repository, redis, stages) for _ in range(2))
        async with AsyncClient(first.target) as client, AsyncClient(second.target) as other:
            await _until(other, classify("connect"), "token_cache", _MISS)
            tokenized = await _until(client, classify("a text for both"), "token_cache", _REDIS)
            found = await other.infer(classify("a text for both"))
    assert found.usage.token_cache == _REDIS
    assert found.result == tokenized.result
    assert found.usage.tokens == tokenized.usage.tokens


@pytest.mark.parametrize("fault", ["killed", "hung", "flushed"])
async def test_no_request_fails_when_redis_does(fake_repository: Path, redis: RedisServer, fault: str) -> None:
    options = ("--repository", str(fake_repository), "--redis-url", redis.url, "--result-cache-models", "*")
    with ServiceProcess("all", *options, *_ONLY_REDIS, environment=_PATIENT) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            texts = [f"text number {number}" for number in range(40)]
            expected = {text: (await client.infer(_uncached(text))).result for text in texts}
            await _until(client, _uncached("connect"), "token_cache", _REDIS)
            outcomes: Counter[CacheOutcome.ValueType] = Counter()
            done = asyncio.Event()

            async def send() -> None:
                while not done.is_set():
                    for text in texts:
                        response = await client.infer(_uncached(text))
                        assert response.result == expected[text]
                        outcomes[response.usage.token_cache] += 1

            async def seen(outcome: "CacheOutcome.ValueType") -> None:
                """From now on, some requests have it."""
                outcomes.clear()
                await happens(lambda: bool(outcomes[outcome]))

            sending = [asyncio.create_task(send()) for _ in range(4)]
            await seen(_REDIS)
            if fault == "killed":
                redis.stop()
            elif fault == "hung":
                redis.send(signal.SIGSTOP)
            else:
                redis.ask("FLUSHALL")
            await seen(_MISS if fault == "flushed" else _BYPASS)
            if fault == "killed":
                redis.start()
            elif fault == "hung":
                redis.send(signal.SIGCONT)
            await _until(client, _uncached("connect again"), "token_cache", _REDIS)
            await seen(_REDIS)
            done.set()
            await asyncio.gather(*sending)


def _uncached(text: str) -> InferRequest:
    """A request whose result is computed, so that the token cache is asked."""
    request = classify(text)
    request.cache_control = CacheControl.CACHE_CONTROL_BYPASS
    return request


async def test_a_result_that_one_gateway_computed_another_finds(fake_repository: Path, redis: RedisServer) -> None:
    options = ("--repository", str(fake_repository), "--redis-url", redis.url, "--result-cache-models", "classifier")
    with ServiceProcess("all", *options) as first, ServiceProcess("all", *options) as second:
        targets = (first.wait_until_ready().target, second.wait_until_ready().target)
        async with AsyncClient(targets[0]) as client, AsyncClient(targets[1]) as other, asyncio.timeout(_LIMIT_S):
            # Both connect, and the one stores, beside the requests; so a text may miss, and the next one is tried.
            found, number = InferResponse(), 0
            while found.usage.result_cache != _REDIS:
                text, number = f"text number {number}", number + 1
                computed = await client.infer(classify(text))
                await asyncio.sleep(0.05)
                found = await other.infer(classify(text))
                assert found.result == computed.result
            assert (await other.infer(classify(text))).usage.result_cache == _MEMORY
