"""The pre-process stage: encodes inputs, each model's in a thread of its own, and caches them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.items import EncodedInput, TokenizeItem
from neuronpipe.core.lanes import Lane, Lanes, is_on_event_loop
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.cache.cache import Cache, Kind, TimedValue
from neuronpipe.stages.settings import EncodingSettings
from neuronpipe.stages.tokenizer.encoder import PACKING, Encoder
from neuronpipe.stages.tokenizer.text import LONG_TEXT

# Parsing, checking and hashing this much takes 0.05 ms for an image and 0.13 ms for a text (measured 2026-11-22, 2
# virtual cores), about as long as switching to a lane's thread and back.
_READ_INLINE_BYTES = 64 << 10


class EncodingModel:
    """One model of the stage. Reading, encoding, and encoding long texts have separate lanes, so that a cache hit does
    not wait for encodings, nor a text for a long one.
    """

    def __init__(
        self,
        encoder: Encoder,
        cache: Cache[EncodedInput] | None,
        reading: Lane,
        encoding: Lane,
        encoding_long_texts: Lane,
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._reading = reading
        self._encoding = encoding
        self._encoding_long_texts = encoding_long_texts

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or takes it from the cache. Raises InvalidInput."""
        size_bytes = item.size_bytes
        work_bytes = self._encoder.work_bytes(size_bytes)
        is_long = self._encoder.kind == "tokens" and size_bytes > LONG_TEXT
        encoding = self._encoding_long_texts if is_long else self._encoding
        if not self._cache:
            return await encoding.run(work_bytes, self._check_and_encode, item)
        key = (
            self._key(item)
            if size_bytes <= _READ_INLINE_BYTES
            else await self._reading.run(size_bytes, self._key, item)
        )
        found, outcome = await self._cache.get(key, size_bytes, partial(encoding.run, work_bytes, self._encode, item))
        # A copy: the cached sets would otherwise also keep their serialized form.
        sequences, annotations = TensorSets(arrays=found.sequences.arrays), TensorSets(arrays=found.annotations.arrays)
        return EncodedInput(sequences, annotations, found.tokens, found.truncated_tokens, outcome)

    def _key(self, item: TokenizeItem) -> bytes:
        input = item.input.message
        self._encoder.check(input)
        return self._encoder.key(input, item.call.caller.cache_scope)

    def _check_and_encode(self, item: TokenizeItem) -> EncodedInput:
        self._encoder.check(item.input.message)
        item.call.check_deadline()
        return self._encoder.encode(item.input.message)

    def _encode(self, item: TokenizeItem) -> TimedValue[EncodedInput]:
        item.call.check_deadline()
        began_s = time.perf_counter()
        encoded = self._encoder.encode(item.input.message)
        seconds = time.perf_counter() - began_s
        # In a thread, the event loop is not blocked.
        return TimedValue(encoded, seconds, blocked_s=seconds if is_on_event_loop() else 0.0)


class TokenizerStage:
    """Encodes inputs. The instance's `tokenize` is the stage function."""

    def __init__(self, models: ServedModels[EncodingModel]) -> None:
        self.models = models

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or takes it from the cache."""
        item.call.check_deadline()
        with self.models.table.find(item.model.name, str(item.model.version)) as model:
            return await model.tokenize(item)


@asynccontextmanager
async def running_tokenizer(
    bundles: list[Bundle], settings: EncodingSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[TokenizerStage]:
    """The stage with every tokenizer loaded. Raises SetupError for a file that is missing or was changed."""
    async with AsyncExitStack() as stack:
        caches: dict[Kind, Cache[EncodedInput] | None] = {
            "tokens": _cache("tokens", settings.token_cache_bytes, settings),
            "pixels": _cache("pixels", settings.image_cache_bytes, settings),
        }
        for cache in filter(None, caches.values()):
            stack.push_async_callback(cache.close)
            if telemetry:
                cache.report(telemetry.meters)
        lanes = stack.enter_context(closing(Lanes("tokenize")))
        long_lanes = stack.enter_context(closing(Lanes("tokenize-long", threads=1)))

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[EncodingModel]:
            reads_special = settings.reads_special_tokens(bundle.spec.name)
            encoder = await asyncio.to_thread(Encoder, bundle, reads_special_tokens=reads_special)
            of_model = [one.lane(bundle.spec.name) for one in (lanes, lanes, long_lanes)]
            try:
                yield EncodingModel(encoder, caches[encoder.kind], *of_model)
            finally:
                for lane in of_model:
                    await lane.close()

        yield TokenizerStage(await stack.enter_async_context(running_models(ServedModels(open_model), bundles)))


def _cache(kind: Kind, memory_bytes: int, settings: EncodingSettings) -> Cache[EncodedInput] | None:
    policy = settings.token_cache_redis
    has_cache = memory_bytes or (settings.redis_url and policy != "never")
    return Cache(kind, memory_bytes, settings, policy, PACKING) if has_cache else None
