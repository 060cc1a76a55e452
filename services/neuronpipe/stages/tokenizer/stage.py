"""The pre-process stage: encodes inputs on a lane of each model, and caches encoded inputs."""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.items import LARGE_INPUT_BYTES, EncodedInput, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.cache.cache import Cache, CacheKind
from neuronpipe.platform.cache.settings import NO_REDIS, RedisSettings
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.lanes import Lane, Lanes
from neuronpipe.stages.settings import EncodingSettings
from neuronpipe.stages.tokenizer.encoder import PACKING, Encoder
from neuronpipe.stages.tokenizer.text import LONG_TEXT


@dataclass(frozen=True)
class EncodingModel:
    """One model of the stage.

    Reading, encoding, and encoding long texts have separate lanes. So a cache hit does not wait for encodings, and a
    short text does not wait for a long text.
    """

    encoder: Encoder
    cache: Cache[EncodedInput] | None
    reading: Lane
    encoding: Lane
    encoding_long_texts: Lane

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or takes it from the cache. Raises InvalidInput."""
        size_bytes, tenant = item.size_bytes, item.call.caller.tenant
        work_bytes = self.encoder.work_bytes(item.input)
        is_long = self.encoder.kind == "tokens" and work_bytes > LONG_TEXT
        lane = self.encoding_long_texts if is_long else self.encoding
        if not self.cache:
            return await lane.run(tenant, work_bytes, self._check_and_encode, item)
        is_small = size_bytes <= LARGE_INPUT_BYTES
        key = self._key(item) if is_small else await self.reading.run(tenant, size_bytes, self._key, item)
        encode = partial(lane.run, tenant, work_bytes, self._encode, item)
        encoded, outcome = await self.cache.get(key, size_bytes, encode)
        # New sets, because the cached sets would otherwise also keep their serialized form.
        sequences, annotations = (TensorSets(arrays=sets.arrays) for sets in (encoded.sequences, encoded.annotations))
        return EncodedInput(sequences, annotations, encoded.tokens, encoded.truncated_tokens, outcome)

    def _key(self, item: TokenizeItem) -> bytes:
        self.encoder.check(item.input)
        return self.encoder.key(item.input, item.call.caller.cache_scope)

    def _check_and_encode(self, item: TokenizeItem) -> EncodedInput:
        self.encoder.check(item.input)
        return self._encode(item)

    def _encode(self, item: TokenizeItem) -> EncodedInput:
        item.call.check_deadline()
        return self.encoder.encode(item.input)


class TokenizerStage:
    """Encodes inputs. The instance's `tokenize` is the stage function."""

    def __init__(self, models: ServedModels[EncodingModel]) -> None:
        self.models = models

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        item.call.check_deadline()
        with self.models.table.at(item.model) as model:
            return await model.tokenize(item)


@asynccontextmanager
async def running_tokenizer(
    bundles: list[Bundle], settings: EncodingSettings, telemetry: Telemetry, redis: RedisSettings = NO_REDIS
) -> AsyncIterator[TokenizerStage]:
    """Runs the stage with every tokenizer loaded. Raises SetupError if a file is missing or was changed."""
    async with AsyncExitStack() as stack:
        caches: dict[CacheKind, Cache[EncodedInput] | None] = {
            "tokens": _cache("tokens", settings, redis),
            "pixels": _cache("pixels", settings, redis),
        }
        for cache in filter(None, caches.values()):
            stack.push_async_callback(cache.close)
            cache.report(telemetry.meters)
        lanes = stack.enter_context(closing(Lanes("tokenize")))
        long_lanes = stack.enter_context(closing(Lanes("tokenize-long", threads=1)))
        image_turn = threading.Lock()  # for all models, because a large image takes half of the memory

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[EncodingModel]:
            reads_special = settings.reads_special_tokens(bundle.spec.name)
            encoder = await run_apart(Encoder, bundle, reads_special_tokens=reads_special, image_turn=image_turn)
            model_lanes = [group.lane(bundle.spec.name) for group in (lanes, lanes, long_lanes)]
            try:
                yield EncodingModel(encoder, caches[encoder.kind], *model_lanes)
            finally:
                for lane in model_lanes:
                    await lane.close()

        def adapt(model: EncodingModel, bundle: Bundle) -> EncodingModel:
            return replace(model, encoder=model.encoder.adapted(bundle.spec))

        models = ServedModels(open_model, adapt=adapt)
        yield TokenizerStage(await stack.enter_async_context(running_models(models, bundles)))


def _cache(kind: CacheKind, settings: EncodingSettings, redis: RedisSettings) -> Cache[EncodedInput] | None:
    memory_bytes, policy = settings.token_cache_bytes, settings.token_cache_redis
    has_cache = memory_bytes or (redis.redis_url and policy != "never")
    return Cache(kind, memory_bytes, redis, policy, PACKING) if has_cache else None
