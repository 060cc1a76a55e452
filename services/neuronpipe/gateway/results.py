"""Results that were computed before, for the models whose results are cached."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import blake2b

from neuronpipe import __version__
from neuronpipe.api.v1.inference_pb2 import CacheControl, CacheOutcome, InferRequest, InferResponse, Usage
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bundles.repository import Bundle
from neuronpipe.cache.cache import Cache, Computed
from neuronpipe.core.config import ResultCacheSettings
from neuronpipe.core.errors import DeadlineExceeded, SetupError
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.stages import Call

_KEY_BYTES = 16
_EVERY_MODEL = "*"


class ResultCache:
    """The results of some models. `digests` are those of their bundles, by model and version: a bundle computes what it computes."""

    def __init__(self, cache: Cache, digests: dict[tuple[str, int], str]) -> None:
        self._cache = cache
        self._digests = digests

    def keeps(self, model: ModelSpec) -> bool:
        """Whether this model's results are cached."""
        return (model.name, model.version) in self._digests

    async def get(
        self, request: InferRequest, model: ModelSpec, call: Call, compute: Callable[[], Awaitable[InferResponse]]
    ) -> InferResponse:
        """The response to a request for a model that is kept: computed by `compute`, once for all who ask at a time, or known already.

        Raises what `compute` raises, and DeadlineExceeded.
        """
        if request.cache_control == CacheControl.CACHE_CONTROL_BYPASS:
            computed = await compute()
            computed.usage.result_cache = CacheOutcome.CACHE_OUTCOME_BYPASS
            return computed
        own: list[InferResponse] = []

        async def keep() -> Computed:
            began_s = time.perf_counter()
            response = await compute()
            own.append(response)
            kept = InferResponse(
                result=response.result,
                usage=Usage(tokens=response.usage.tokens, truncated_tokens=response.usage.truncated_tokens),
            )
            return Computed(kept.SerializeToString(), time.perf_counter() - began_s)

        is_refresh = request.cache_control == CacheControl.CACHE_CONTROL_REFRESH
        try:
            async with asyncio.timeout(None if call.deadline_s is None else call.deadline_s - time.monotonic()):
                payload, outcome = await self._cache.get(
                    self._key(model, request.input), request.input.ByteSize(), keep, refresh=is_refresh, is_bulk=call.is_bulk
                )
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the result was ready") from error
        if own:
            own[0].usage.result_cache = outcome
            return own[0]
        response = InferResponse.FromString(payload)
        response.model, response.version, response.request_id = model.name, str(model.version), call.request_id
        response.usage.result_cache = outcome
        return response

    def _key(self, model: ModelSpec, input: TaskInput) -> bytes:
        # A release may compute otherwise.
        digest = f"{__version__} {self._digests[model.name, model.version]}".encode()
        return blake2b(digest + input.SerializeToString(deterministic=True), digest_size=_KEY_BYTES).digest()


@asynccontextmanager
async def running_result_cache(
    bundles: list[Bundle], settings: ResultCacheSettings, telemetry: Telemetry
) -> AsyncIterator[ResultCache | None]:
    """The cache for the models that ask for it, by setting or by manifest; None where none does. Raises SetupError for an unknown one."""
    asked = {name.strip() for name in settings.result_cache_models.split(",")} - {""}
    known = {bundle.spec.name for bundle in bundles}
    if unknown := asked - known - {_EVERY_MODEL}:
        raise SetupError(f"result_cache_models: {', '.join(sorted(unknown))} is not served; served are: {', '.join(sorted(known))}")
    kept = [bundle for bundle in bundles if _EVERY_MODEL in asked or bundle.spec.name in asked or bundle.manifest.cache_results]
    if not kept:
        yield None
        return
    cache = Cache("results", settings.result_cache_bytes, settings, settings.result_cache_redis)
    cache.report(telemetry.meters)
    try:
        yield ResultCache(cache, {bundle.key: bundle.digest for bundle in kept})
    finally:
        await cache.close()
