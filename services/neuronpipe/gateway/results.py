"""Results that were computed before, for the models whose results are cached."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b

from neuronpipe import __version__
from neuronpipe.api.forward.v1 import inference_pb2 as wire
from neuronpipe.api.v1.inference_pb2 import CacheControl, CacheOutcome, Usage
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import Packed
from neuronpipe.gateway.inference import InferenceRequest
from neuronpipe.gateway.settings import ResultCacheSettings
from neuronpipe.platform.cache.cache import Cache, TimedValue
from neuronpipe.platform.cache.sealing import ValueCodec

_KEY_BYTES = 16
_EVERY_MODEL = "*"
# Three objects' headers beside the bytes (measured with sys.getsizeof on CPython 3.11).
_OVERHEAD_BYTES = 200


@dataclass(frozen=True, slots=True)
class _KnownResult:
    """A result as it is kept."""

    result: Packed[TaskResult]
    tokens: int
    truncated_tokens: int


def _pack(known: _KnownResult) -> bytes:
    message = wire.InferResponse(result=known.result.data)
    message.usage.tokens, message.usage.truncated_tokens = known.tokens, known.truncated_tokens
    return message.SerializeToString()


def _unpack(payload: bytes) -> _KnownResult:
    message = wire.InferResponse.FromString(payload)
    return _KnownResult(Packed(TaskResult, data=message.result), message.usage.tokens, message.usage.truncated_tokens)


_CODEC = ValueCodec(_pack, _unpack, lambda known: known.result.size_bytes + _OVERHEAD_BYTES)


class ResultCache:
    """The results of some models."""

    def __init__(self, cache: Cache[_KnownResult]) -> None:
        self._cache = cache

    async def get(
        self, request: InferenceRequest, digest: str, compute: Callable[[], Awaitable[tuple[Packed[TaskResult], Usage]]]
    ) -> tuple[Packed[TaskResult], Usage]:
        """The result of a request: computed by `compute`, once for all who ask at a time, or known already.

        `digest`: of the model's bundle, which computes what it computes. Raises what `compute` raises.
        """
        if request.cache_control == CacheControl.CACHE_CONTROL_BYPASS:
            result, usage = await compute()
            usage.result_cache = CacheOutcome.CACHE_OUTCOME_BYPASS
            return result, usage
        own: list[tuple[Packed[TaskResult], Usage]] = []

        async def keep() -> TimedValue[_KnownResult]:
            began_s = time.perf_counter()
            result, usage = await compute()
            own.append((result, usage))
            # As bytes, which is what a door sends: the message would be kept beside them.
            kept = Packed(TaskResult, data=result.data)
            return TimedValue(_KnownResult(kept, usage.tokens, usage.truncated_tokens), time.perf_counter() - began_s)

        is_refresh = request.cache_control == CacheControl.CACHE_CONTROL_REFRESH
        key, size_bytes = _key(request.call.caller.cache_scope, digest, request.input.data), request.input.size_bytes
        known, outcome = await self._cache.get(key, size_bytes, keep, refresh=is_refresh, is_bulk=request.call.is_bulk)
        if own:
            result, usage = own[0]
            # Also where Redis was left out of the search: BYPASS is said to those who asked for it.
            usage.result_cache = CacheOutcome.CACHE_OUTCOME_MISS
            return result, usage
        # A value of its own, as whoever parses it keeps the message in it.
        result = Packed(TaskResult, data=known.result.data)
        return result, Usage(tokens=known.tokens, truncated_tokens=known.truncated_tokens, result_cache=outcome)


def _key(scope: str, digest: str, input: bytes) -> bytes:
    # A release may compute otherwise. Equal inputs that were serialized differently have keys of their own, which costs
    # a miss.
    head = f"{__version__} {digest}".encode()
    if scope:  # with its length, as a name may hold anything
        head = f"{len(scope)} {scope} ".encode() + head
    return blake2b(head + input, digest_size=_KEY_BYTES).digest()


def kept_results(bundles: list[Bundle], settings: ResultCacheSettings) -> Callable[[Bundle], bool]:
    """Returns a function that says whether a model's results are cached, by the setting or by the manifest.

    Raises SetupError for an unknown model in the setting.
    """
    asked = {name.strip() for name in settings.result_cache_models.split(",")} - {""}
    known = {bundle.spec.name for bundle in bundles}
    if unknown := asked - known - {_EVERY_MODEL}:
        raise SetupError(
            f"result_cache_models: {', '.join(sorted(unknown))} is not served; served are: {', '.join(sorted(known))}"
        )
    return lambda bundle: _EVERY_MODEL in asked or bundle.spec.name in asked or bundle.manifest.cache_results


@asynccontextmanager
async def running_result_cache(settings: ResultCacheSettings, telemetry: Telemetry) -> AsyncIterator[ResultCache]:
    """The cache of a gateway's results."""
    cache = Cache("results", settings.result_cache_bytes, settings, settings.result_cache_redis, _CODEC)
    cache.report(telemetry.meters)
    try:
        yield ResultCache(cache)
    finally:
        await cache.close()
