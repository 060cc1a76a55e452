"""Tenants' quotas, shares and caches, with real clients, and budgets that several gateways share through Redis."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.client import Client, Overloaded
from tests.callers.requests import classify, embed
from tests.servers.redis import RedisServer, redis_server
from tests.suite.constants import constants
from tests.suite.waiting import until
from tests.systems.guarded_gateway import Files, Guarded, fails_with, guarded_server, make_files

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_MISS, _HIT = CacheOutcome.CACHE_OUTCOME_MISS, CacheOutcome.CACHE_OUTCOME_HIT_MEMORY
_TENANTS = """
[tenants.search]
tokens_per_minute = 600

[tenants.labels]
max_requests_in_flight = 1
highest_priority = "bulk"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("files"), _TENANTS)


@pytest.fixture
def guarded(http_repository: Path, files: Files) -> Iterator[Guarded]:
    with guarded_server(http_repository, files, "--result-cache-models", "minilm") as guarded:
        yield guarded


def _client(target: str, key: str) -> Client:
    return Client(target, api_key=key, retries=False)


def _spend(client: Client) -> tuple[int, float]:
    """Sends requests until the budget is used up. Returns the tokens that were answered, and how many came back
    meanwhile, ten a second.
    """
    tokens, began_s = 0, time.monotonic()
    for number in range(1000):
        try:
            response = client.infer(classify(f"text {number} of many words " * 8))
        except Overloaded:
            return tokens, 10 * (time.monotonic() - began_s)
        tokens += response.usage.tokens
    raise AssertionError("the budget has no end")


def test_a_budget_that_is_used_up_says_when_to_come_back(guarded: Guarded) -> None:
    with _client(guarded.target, guarded.files.search) as client:
        spent, came_back = _spend(client)
    # The last request may make a debt.
    assert 500 < spent < 800 + came_back
    metadata = (("authorization", f"Bearer {guarded.files.search}"),)
    with grpc.insecure_channel(guarded.target) as channel, pytest.raises(grpc.RpcError) as raised:
        InferenceServiceStub(channel).Infer(classify("a " * 300), metadata=metadata, timeout=10)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers: dict[str, Any] = dict(raised.value.trailing_metadata())  # type: ignore[arg-type]
    delay = _retry_delay(trailers)
    assert 0.05 <= delay.ToNanoseconds() / 1e9 <= 120
    assert int(trailers["grpc-retry-pushback-ms"]) == pytest.approx(delay.ToMilliseconds(), abs=1)
    with (
        openai.OpenAI(base_url=f"{guarded.server.url}/v1", api_key=guarded.files.search, max_retries=0) as other_door,
        pytest.raises(openai.RateLimitError) as limited,
    ):
        other_door.embeddings.create(model="minilm", input="a " * 300)
    assert int(limited.value.response.headers["retry-after"]) >= 1
    assert "the limit is 600 tokens a minute" in str(limited.value)


def _retry_delay(trailers: dict[str, Any]) -> Any:
    info = RetryInfo()
    details = Status.FromString(trailers["grpc-status-details-bin"]).details
    unpacked = [detail.Unpack(info) for detail in details]
    assert any(unpacked)
    return info.retry_delay


def test_no_tenant_gets_what_another_left_in_a_cache(guarded: Guarded) -> None:
    with _client(guarded.target, guarded.files.search) as ours, _client(guarded.target, guarded.files.labels) as theirs:
        first, again = ours.infer(embed("a secret")).usage, ours.infer(embed("a secret")).usage
        usage = theirs.infer(embed("a secret")).usage
        assert (first.result_cache, again.result_cache, usage.result_cache) == (_MISS, _HIT, _MISS)
        assert usage.token_cache == _MISS
        ours.infer(classify("a secret"))
        assert ours.infer(classify("a secret")).usage.token_cache == _HIT
        assert theirs.infer(classify("a secret")).usage.token_cache == _MISS


def test_a_tokenizer_of_its_own_keeps_tenants_apart(fake_repository: Path, files: Files) -> None:
    environment = {"NEURONPIPE_GATEWAY_API_KEYS": str(files.keys)}
    with four_processes(fake_repository, environment=environment) as processes:
        target = processes["gateway"].target
        with _client(target, files.search) as ours, _client(target, files.labels) as theirs:
            ours.infer(classify("a secret"))
            assert ours.infer(classify("a secret")).usage.token_cache == _HIT
            assert theirs.infer(classify("a secret")).usage.token_cache == _MISS


class _Gateways:
    """Two processes, a Redis, and their budgets."""

    def __init__(self, repository: Path, files: Files, redis: RedisServer, stack: ExitStack) -> None:
        self.redis = redis
        options = ("--repository", str(repository), *files.options, "--redis-url", redis.url)
        never = ("--token-cache-redis", "never")
        self.processes = [
            stack.enter_context(ServiceProcess("all", *options, *never, environment=constants(redis_timeout_ms=1000)))
            for _ in range(2)
        ]
        self.clients = [
            stack.enter_context(_client(process.wait_until_ready().target, files.search)) for process in self.processes
        ]

    @property
    def known(self) -> int:
        """How many gateways have told Redis of the tenant."""
        return len(self.exchanges)

    @property
    def exchanges(self) -> set[tuple[bytes, bytes]]:
        """The gateways that have told Redis of the tenant, each with the time of its last exchange."""
        fields: dict[bytes, bytes] = self.redis.ask("HGETALL", "neuronpipe:budget:search")
        return {(name, value) for name, value in fields.items() if name.startswith(b"gateway:")}


@pytest.fixture
def gateways(http_repository: Path, files: Files) -> Iterator[_Gateways]:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        yield _Gateways(http_repository, files, redis, stack)


def test_gateways_share_a_budget(gateways: _Gateways) -> None:
    first, second = gateways.clients
    second.infer(classify("a"))  # so that it asks for the tenant's budget
    until(lambda: gateways.known == 1)
    _spend(first)
    until(lambda: gateways.known == 2)
    until(lambda: fails_with(Overloaded, lambda: second.infer(classify("a " * 40))))


def test_without_redis_each_gateway_has_its_share(gateways: _Gateways) -> None:
    for client in gateways.clients:
        client.infer(classify("a"))
    until(lambda: gateways.known == 2)
    before = gateways.exchanges  # the first gateway was alone in its own
    until(lambda: not before & gateways.exchanges)
    gateways.redis.send(signal.SIGSTOP)  # connections stay, and nothing answers
    for process in gateways.processes:
        process.wait_for("budgets are not shared: Redis does not answer")
    spent = [_spend(client) for client in gateways.clients]
    # Half of 600 each, what comes back meanwhile, and a last request that may make a debt.
    assert all(100 < taken < 500 + came_back for taken, came_back in spent), spent
    gateways.redis.send(signal.SIGCONT)
    for process in gateways.processes:
        process.wait_for("budgets are shared again")


def test_a_redis_that_was_never_there_holds_up_nobody(http_repository: Path, files: Files) -> None:
    options = ("--repository", str(http_repository), *files.options, "--redis-url", "redis://127.0.0.1:1/0")
    with ServiceProcess("all", *options) as process, _client(process.wait_until_ready().target, files.search) as client:
        client.infer(classify("a"))
        process.wait_for("budgets are not shared: Redis does not answer")
        spent, came_back = _spend(client)
        assert 500 < spent < 800 + came_back
