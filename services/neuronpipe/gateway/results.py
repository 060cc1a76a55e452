"""The cache of results, for the models whose results are cached."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from hashlib import blake2b

from neuronpipe import __version__
from neuronpipe.api.forward.v1 import inference_pb2 as wire
from neuronpipe.api.v1.inference_pb2 import CacheControl, CacheOutcome, Usage
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import Packed
from neuronpipe.core.units import words_of
from neuronpipe.gateway.requests import Result
from neuronpipe.gateway.running import RunningRequest
from neuronpipe.gateway.settings import ResultCacheSettings
from neuronpipe.platform.cache.cache import Cache
from neuronpipe.platform.cache.sealing import ValueCodec
from neuronpipe.platform.cache.settings import NO_REDIS, RedisSettings
from neuronpipe.tasks import ANSWERED_TASKS

_KEY_BYTES = 16
_EVERY_MODEL = "*"
# The headers of a result's objects, in addition to its bytes (sys.getsizeof on CPython 3.11).
_OVERHEAD_BYTES = 400


@dataclass(frozen=True, slots=True)
class _KnownResult:
    """A result in the cache: the bytes of a TaskResult, which a door sends."""

    result: bytes
    counts: Usage


def _counts(usage: Usage) -> Usage:
    """Returns the counts that are the same for every request with the result."""
    tokens, truncated_tokens = usage.tokens, usage.truncated_tokens
    return Usage(tokens=tokens, truncated_tokens=truncated_tokens, generated_tokens=usage.generated_tokens)


def _pack(entry: _KnownResult) -> bytes:
    return wire.InferResponse(result=entry.result, usage=entry.counts).SerializeToString()


def _unpack(payload: bytes) -> _KnownResult:
    message = wire.InferResponse.FromString(payload)
    return _KnownResult(message.result, _counts(message.usage))


_CODEC = ValueCodec(_pack, _unpack, lambda stored: len(stored.result) + _OVERHEAD_BYTES)


class ResultCache:
    """The cached results of some models."""

    def __init__(self, cache: Cache[_KnownResult]) -> None:
        self._cache = cache

    async def get(self, running: RunningRequest) -> tuple[Result, Usage]:
        """Returns the cached result of a request, or computes one result for all equal requests that wait for it."""
        request, call = running.request, running.call
        if request.cache_control == CacheControl.CACHE_CONTROL_BYPASS:
            result, usage = await running.answer()
            usage.result_cache = CacheOutcome.CACHE_OUTCOME_BYPASS
            return result, usage
        computed: list[tuple[Packed[TaskResult], Usage]] = []

        async def keep() -> _KnownResult:
            result, usage = await running.answer()
            assert isinstance(result, Packed)  # noqa: S101 (outputs of models are not repeatable)
            computed.append((result, usage))
            return _KnownResult(result.data, _counts(usage))

        is_refresh = request.cache_control == CacheControl.CACHE_CONTROL_REFRESH
        reads_date = ANSWERED_TASKS[request.input.task or ""].reads_date(request.input.body)
        key = _key(call.caller.cache_scope, running.model.digest, request.input.data, reads_date=reads_date)
        size_bytes = request.input.size_bytes
        entry, outcome = await self._cache.get(key, size_bytes, keep, refresh=is_refresh, is_bulk=call.is_bulk)
        if computed:
            result, usage = computed[0]
            # A result that Redis was not asked for is also a miss: BYPASS is for callers who ask for it.
            usage.result_cache = CacheOutcome.CACHE_OUTCOME_MISS
            return result, usage
        usage = _counts(entry.counts)
        usage.result_cache = outcome
        return Packed(TaskResult, data=entry.result), usage


def _key(scope: str, digest: str, input: bytes, *, reads_date: bool) -> bytes:
    # Another release may compute another result. Equal inputs that were serialized differently have different keys,
    # which costs a miss.
    head = f"{__version__} {digest} {date.today().isoformat() if reads_date else ''}".encode()
    if scope:  # with its length, because a name may contain any character
        head = f"{len(scope)} {scope} ".encode() + head
    return blake2b(head + input, digest_size=_KEY_BYTES).digest()


def kept_results(bundles: Iterable[Bundle], settings: ResultCacheSettings) -> Callable[[Bundle], bool]:
    """Returns a function that says whether a model's results are cached, by the setting or by the manifest.

    Raises SetupError for an unknown model in the setting.
    """
    asked = set(words_of(settings.result_cache_models))
    served = {bundle.spec.name for bundle in bundles}
    if unknown := asked - served - {_EVERY_MODEL}:
        raise SetupError(
            f"result_cache_models: {', '.join(sorted(unknown))} is not served; served are: {', '.join(sorted(served))}"
        )
    return lambda bundle: _EVERY_MODEL in asked or bundle.spec.name in asked or bundle.manifest.cache_results


@asynccontextmanager
async def running_result_cache(
    settings: ResultCacheSettings, telemetry: Telemetry, redis: RedisSettings = NO_REDIS
) -> AsyncIterator[ResultCache]:
    """Runs the cache of a gateway's results."""
    cache = Cache("results", settings.result_cache_bytes, redis, "auto", _CODEC)
    cache.report(telemetry.meters)
    try:
        yield ResultCache(cache)
    finally:
        await cache.close()
