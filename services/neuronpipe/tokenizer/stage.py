"""The pre-process stage: finds what reads the model's texts or images, lets the task encode, and packs the sequences."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b

from neuronpipe import __version__
from neuronpipe.api.v1.stages_pb2 import EncodedInput, TokenizeItem
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bundles.repository import Bundle
from neuronpipe.cache.cache import Cache, Computed
from neuronpipe.core import images
from neuronpipe.core.config import TokenCacheSettings
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable, encoding_traits
from neuronpipe.core.stages import Call
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.core.worker import Worker
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.base import ImageReader, Task, TextTokenizer
from neuronpipe.tokenizer.packing import PACKING
from neuronpipe.tokenizer.text import LIBRARY_VERSION, JsonTokenizer

_KEY_BYTES = 16
# Done in the worker's thread, never on the event loop.
_LONG_WORK_BYTES = 1 << 20


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
        # A small file may hold a large image.
        self._is_always_long = bundle.spec.image is not None

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
        """How large the input of an item of so many bytes is as work."""
        return max(size_bytes, _LONG_WORK_BYTES) if self._is_always_long else size_bytes

    def encode(self, input: TaskInput) -> EncodedInput:
        """Encodes an input that was checked. Raises InvalidInput."""
        task = self._task_of(input)
        encoded = task.encode(getattr(input, task.name), self._reader, self._spec)
        return EncodedInput(
            sequences=[to_tensor_set(sequence) for sequence in encoded.sequences],
            annotations=[to_tensor_set(annotation) for annotation in encoded.annotations],
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


class TokenizerStage:
    """Encodes inputs. The instance's `tokenize` is the stage function."""

    def __init__(self, bundles: list[Bundle], cache: Cache | None = None) -> None:
        """Loads every bundle's tokenizer. Raises SetupError for a file that is missing or was changed."""
        self._encoders = ModelTable({bundle.key: Encoder(bundle) for bundle in bundles})
        self._worker = Worker("tokenize")
        self._cache = cache

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input, or finds it encoded."""
        call, size_bytes = Call.of_item(item.context), item.ByteSize()
        call.check_deadline()
        encoder = self._encoders.find(item.model, item.version)
        encoder.check(item.input)
        work_bytes = encoder.work_bytes(size_bytes)
        if not self._cache:
            return await self._worker.run(work_bytes, _encode, encoder, item.input, call)
        compute = partial(self._worker.run, work_bytes, _encode_timed, encoder, item.input, call)
        payload, outcome = await self._cache.get(encoder.key(item.input), size_bytes, compute)
        encoded = EncodedInput.FromString(payload)
        encoded.token_cache = outcome
        return encoded

    def close(self) -> None:
        """Waits for the item being encoded and ends the thread."""
        self._worker.close()


@asynccontextmanager
async def running_tokenizer(
    bundles: list[Bundle], settings: TokenCacheSettings, telemetry: Telemetry | None = None
) -> AsyncIterator[TokenizerStage]:
    """The stage with every tokenizer loaded. Raises SetupError."""
    policy = settings.token_cache_redis
    has_cache = settings.token_cache_bytes or (settings.redis_url and policy != "never")
    cache = Cache("tokens", settings.token_cache_bytes, settings, policy, PACKING) if has_cache else None
    if cache and telemetry:
        cache.report(telemetry.meters)
    try:
        stage = await asyncio.to_thread(TokenizerStage, bundles, cache)
        try:
            yield stage
        finally:
            stage.close()
    finally:
        if cache:
            await cache.close()


def _encode(encoder: Encoder, input: TaskInput, call: Call) -> EncodedInput:
    call.check_deadline()
    return encoder.encode(input)


def _encode_timed(encoder: Encoder, input: TaskInput, call: Call) -> Computed:
    call.check_deadline()
    began_s = time.perf_counter()
    payload = encoder.encode(input).SerializeToString()
    seconds = time.perf_counter() - began_s
    # In the thread the event loop goes on.
    return Computed(payload, seconds, blocked_s=seconds if _is_on_event_loop() else 0.0)


def _is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
