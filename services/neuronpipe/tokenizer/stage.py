"""The pre-process stage: finds what reads the model's texts or images, lets the task encode, and packs the sequences."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from hashlib import blake2b

from neuronpipe import __version__
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.cache.cache import Cache, Kind, TimedValue
from neuronpipe.core.items import EncodedInput, TokenizeItem
from neuronpipe.core.lanes import Lane, Lanes, is_on_event_loop
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import encoding_traits
from neuronpipe.core.packed import TensorSets
from neuronpipe.inputs import images
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.base import ImageReader, Task, TextTokenizer
from neuronpipe.tokenizer.packing import PACKING
from neuronpipe.tokenizer.settings import TokenCacheSettings
from neuronpipe.tokenizer.text import LIBRARY_VERSION, JsonTokenizer

_KEY_BYTES = 16
# Done in a lane, never on the event loop.
_LONG_WORK_BYTES = 1 << 20
# To parse, check and hash so much takes 0.05 ms of an image and 0.13 ms of a text (measured 2026-11-22, 2 virtual cores), about what a
# lane's thread takes to come and go.
_READ_INLINE_BYTES = 64 << 10


class Encoder:
    """Encodes the inputs of one model, and knows which of them are encoded alike."""

    def __init__(self, bundle: Bundle) -> None:
        """Loads the tokenizer. Raises SetupError for a file that is missing or was changed."""
        self._spec = bundle.spec
        self._tasks = {name: TASKS[name] for name in bundle.spec.tasks}
        self._reader, reader_traits = _reader(bundle)
        # A release may encode otherwise.
        traits = (__version__, *reader_traits, *encoding_traits(bundle.spec))
        self._key = blake2b(repr(traits).encode(), digest_size=_KEY_BYTES)
        # What its inputs become, and where that is cached.
        self.kind: Kind = "pixels" if bundle.spec.image else "tokens"

    def check(self, input: TaskInput) -> None:
        """Checks what needs no tokens. Raises InvalidInput."""
        task = self._task_of(input)
        task.check(getattr(input, task.name), self._spec)

    def key(self, input: TaskInput) -> bytes:
        """Equal for inputs that have the same encoding: a digest of the tokenizer, the task, its options and the texts."""
        task, key = self._task_of(input), self._key.copy()
        # As Python would write them, so that no word moves from one to the next unnoticed.
        key.update(repr((task.name, *task.traits(getattr(input, task.name)))).encode())
        return key.digest()

    def work_bytes(self, size_bytes: int) -> int:
        """The bytes of an input as its lane counts them: every image as long work, since a small file may hold a large image."""
        return max(size_bytes, _LONG_WORK_BYTES) if self.kind == "pixels" else size_bytes

    def encode(self, input: TaskInput) -> EncodedInput:
        """Encodes an input that was checked; the arrays are read-only. Raises InvalidInput."""
        task = self._task_of(input)
        encoded = task.encode(getattr(input, task.name), self._reader, self._spec)
        for arrays in (*encoded.sequences, *encoded.annotations):
            for array in arrays.values():
                array.setflags(write=False)
        return EncodedInput(
            sequences=TensorSets(arrays=encoded.sequences),
            annotations=TensorSets(arrays=encoded.annotations),
            tokens=sum(self._spec.tokens_of(sequence) for sequence in encoded.sequences),
            truncated_tokens=encoded.truncated_tokens,
        )

    def _task_of(self, input: TaskInput) -> Task:
        # Gateways send what the model answers only.
        return self._tasks[input.WhichOneof("task") or self._spec.task]


def _reader(bundle: Bundle) -> tuple[TextTokenizer | ImageReader, tuple[str, ...]]:
    """What reads a model's inputs, and all but the model's spec that its readings depend on. Raises SetupError."""
    if bundle.spec.image:
        return partial(images.read_pixels, spec=bundle.spec.image), (images.LIBRARY_VERSION,)
    digest = bundle.manifest.files[bundle.manifest.tokenizer_file]
    return JsonTokenizer(bundle.tokenizer_file()), (LIBRARY_VERSION, digest)


class EncodingModel:
    """One model as the stage serves it. Reading inputs and encoding have a lane each: a cache hit waits for no encoding."""

    def __init__(self, encoder: Encoder, cache: Cache[EncodedInput] | None, reading: Lane, encoding: Lane) -> None:
        self._encoder = encoder
        self._cache = cache
        self._reading = reading
        self._encoding = encoding

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or finds it encoded. Raises InvalidInput."""
        size_bytes = item.size_bytes
        work_bytes = self._encoder.work_bytes(size_bytes)
        if not self._cache:
            return await self._encoding.run(work_bytes, self._check_and_encode, item)
        key = self._key(item) if size_bytes <= _READ_INLINE_BYTES else await self._reading.run(size_bytes, self._key, item)
        found, outcome = await self._cache.get(key, size_bytes, partial(self._encoding.run, work_bytes, self._encode, item))
        # Sets of its own, as those that the cache keeps would keep their serialized form, too.
        sequences, annotations = TensorSets(arrays=found.sequences.arrays), TensorSets(arrays=found.annotations.arrays)
        return EncodedInput(sequences, annotations, found.tokens, found.truncated_tokens, outcome)

    def _key(self, item: TokenizeItem) -> bytes:
        input = item.input.message
        self._encoder.check(input)
        return self._encoder.key(input)

    def _check_and_encode(self, item: TokenizeItem) -> EncodedInput:
        self._encoder.check(item.input.message)
        item.call.check_deadline()
        return self._encoder.encode(item.input.message)

    def _encode(self, item: TokenizeItem) -> TimedValue[EncodedInput]:
        item.call.check_deadline()
        began_s = time.perf_counter()
        encoded = self._encoder.encode(item.input.message)
        seconds = time.perf_counter() - began_s
        # In a thread the event loop goes on.
        return TimedValue(encoded, seconds, blocked_s=seconds if is_on_event_loop() else 0.0)


class TokenizerStage:
    """Encodes inputs. The instance's `tokenize` is the stage function."""

    def __init__(self, models: ServedModels[EncodingModel]) -> None:
        self.models = models

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or finds it encoded."""
        item.call.check_deadline()
        with self.models.table.find(item.model.name, str(item.model.version)) as model:
            return await model.tokenize(item)


@asynccontextmanager
async def running_tokenizer(
    bundles: list[Bundle], settings: TokenCacheSettings, telemetry: Telemetry | None = None
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

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[EncodingModel]:
            encoder = await asyncio.to_thread(Encoder, bundle)
            reading, encoding = (lanes.lane(bundle.spec.name) for _ in range(2))
            try:
                yield EncodingModel(encoder, caches[encoder.kind], reading, encoding)
            finally:
                await reading.close()
                await encoding.close()

        yield TokenizerStage(await stack.enter_async_context(running_models(ServedModels(open_model), bundles)))


def _cache(kind: Kind, memory_bytes: int, settings: TokenCacheSettings) -> Cache[EncodedInput] | None:
    policy = settings.token_cache_redis
    has_cache = memory_bytes or (settings.redis_url and policy != "never")
    return Cache(kind, memory_bytes, settings, policy, PACKING) if has_cache else None
