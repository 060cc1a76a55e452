"""Encodes the inputs of one model, as the task defines it, and packs encoded inputs for Redis.

Redis stores the wire message, with arrays as 16-bit numbers if their values allow it. Token ids and positions are int32
[tokens]. The lowest value is -1 (no position). Most vocabularies end below 65,535.
"""

import copy
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from hashlib import blake2b

import numpy as np

from neuronpipe import __version__
from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.api.v1.tensors_pb2 import DataType, TensorSet
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.items import EncodedInput, work_bytes
from neuronpipe.core.model import ModelSpec, encoding_traits
from neuronpipe.core.packed import Packed, TensorSets
from neuronpipe.core.tensors import to_arrays, to_tensor_set
from neuronpipe.platform.cache.cache import CacheKind
from neuronpipe.platform.cache.sealing import ValueCodec
from neuronpipe.stages.tokenizer.text import LIBRARY_VERSION, LONG_TEXT, JsonTokenizer
from neuronpipe.tasks import ANSWERED_TASKS
from neuronpipe.tasks.base import ImageReader, Readers, Reads, Task, TextTokenizer, truncation_tokens
from neuronpipe.tasks.text_options import GenerationFacts

# Between the stages a tensor always has a type. A tensor without a type is packed.
_PACKED, _WHOLE = DataType.DATA_TYPE_UNSPECIFIED, DataType.DATA_TYPE_INT32
_LEAST, _MOST = -1, 65_534
# Bytes of an encoded input, each of its sets, and each of its arrays without the numbers. On CPython 3.11 and NumPy 2,
# tracemalloc measured 312, 184 and 163 bytes (2026-11-22).
_VALUE_BYTES, _SET_BYTES, _ARRAY_BYTES = 320, 184, 164


def pack(encoded: EncodedInput) -> bytes:
    """Packs an encoded input into bytes, without its cache outcome."""
    message = stages_pb2.EncodedInput(
        sequences=map(to_tensor_set, encoded.sequences.arrays),
        annotations=map(to_tensor_set, encoded.annotations.arrays),
        tokens=encoded.tokens,
        truncated_tokens=encoded.truncated_tokens,
    )
    for tensors in (*message.sequences, *message.annotations):
        for tensor in tensors.tensors:
            numbers = np.frombuffer(tensor.data if tensor.data_type == _WHOLE else b"", "<i4")
            if numbers.size and numbers.min() >= _LEAST and numbers.max() <= _MOST:
                tensor.data_type = _PACKED
                tensor.data = (numbers - _LEAST).astype("<u2").tobytes()
    return message.SerializeToString()


def unpack(packed: bytes) -> EncodedInput:
    """Unpacks an encoded input from bytes. Its arrays are read-only."""
    message = stages_pb2.EncodedInput.FromString(packed)
    for tensors in (*message.sequences, *message.annotations):
        for tensor in tensors.tensors:
            if tensor.data_type == _PACKED:
                tensor.data_type = _WHOLE
                tensor.data = (np.frombuffer(tensor.data, "<u2").astype("<i4") + _LEAST).tobytes()
    return EncodedInput(
        _arrays(message.sequences), _arrays(message.annotations), message.tokens, message.truncated_tokens
    )


def size_bytes(encoded: EncodedInput) -> int:
    sets = (*encoded.sequences.arrays, *encoded.annotations.arrays)
    return _VALUE_BYTES + sum(
        _SET_BYTES + sum(_ARRAY_BYTES + array.nbytes for array in arrays.values()) for arrays in sets
    )


def _arrays(sets: Iterable[TensorSet]) -> TensorSets:
    return TensorSets(arrays=[to_arrays(tensors) for tensors in sets])


PACKING: ValueCodec[EncodedInput] = ValueCodec(pack, unpack, size_bytes)


_KEY_BYTES = 16
# Work from this size on runs in a lane, never on the event loop.
_LONG_WORK_BYTES = 1 << 20


class Encoder:
    """Encodes the inputs of one model, and gives inputs with the same encoding the same key."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        reads_special_tokens: bool = False,
        image_turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """Loads the tokenizer. Raises SetupError if a file is missing or was changed.

        `reads_special_tokens`: see JsonTokenizer. `image_turn`: see read_pixels.
        """
        self._spec = bundle.spec
        self._readers, reader_traits = _readers(bundle, reads_special_tokens, image_turn)
        # Another release of the library may encode differently.
        traits = (__version__, reads_special_tokens, *reader_traits, *encoding_traits(bundle.spec))
        self._key = blake2b(repr(traits).encode(), digest_size=_KEY_BYTES)
        # The kind of encoded inputs decides the cache that stores them.
        self.kind: CacheKind = "pixels" if bundle.spec.image else "tokens"

    def adapted(self, spec: ModelSpec) -> "Encoder":
        """Returns the encoder for an adapter of the model. It shares the tokenizer, and the encodings in caches."""
        encoder = copy.copy(self)
        encoder._spec = spec
        return encoder

    def check(self, input: Packed[TaskInput]) -> None:
        """Checks everything that can be checked without tokenizing. Raises InvalidInput and WrongTask."""
        task = self._task_of(input)
        self._spec.check_answers(task.name)  # gateways have checked it, but other clients may reach the stage
        task.check(input.body, self._spec)

    def key(self, input: Packed[TaskInput], scope: str = "") -> bytes:
        """Makes a key that is equal for inputs of the same encoding: a digest of tokenizer, task, options and texts.

        `scope`: callers of one scope share encodings; empty for callers that share encodings with all others.
        """
        task, key = self._task_of(input), self._key.copy()
        if scope:
            key.update(repr(scope).encode())
        # repr separates the values, so that different values never give the same bytes.
        message = input.body
        key.update(repr((task.name, truncation_tokens(message), *map(_short, task.traits(message)))).encode())
        return key.digest()

    def work_bytes(self, input: Packed[TaskInput]) -> int:
        """Returns the size of an input as its lane counts it. Raises InvalidInput.

        Every image counts as long work, because a small file may contain a large image.
        """
        return max(input.size_bytes, _LONG_WORK_BYTES) if self.kind == "pixels" else work_bytes(input)

    def encode(self, input: Packed[TaskInput]) -> EncodedInput:
        """Encodes a checked input into read-only arrays. Raises InvalidInput."""
        task = self._task_of(input)
        message, spec = input.body, self._spec
        if (most := truncation_tokens(message)) and not task.generates:  # generating tasks keep room behind the prompt
            spec = spec.model_copy(update={"max_tokens": min(most, spec.max_tokens), "largest_bucket": ""})
        encoded = task.encode(message, self._readers[task.reads], spec)
        for arrays in (*encoded.sequences, *encoded.annotations):
            for array in arrays.values():
                array.setflags(write=False)
        return EncodedInput(
            sequences=TensorSets(arrays=encoded.sequences),
            annotations=TensorSets(arrays=encoded.annotations),
            tokens=sum([self._spec.tokens_of(sequence) for sequence in encoded.sequences]),
            truncated_tokens=encoded.truncated_tokens,
        )

    def _task_of(self, input: Packed[TaskInput]) -> Task:
        return ANSWERED_TASKS[input.task or self._spec.task]


def _short(trait: str | int) -> str | int | bytes:
    """Replaces a long text by its digest: repr would keep the interpreter's lock for 5 ms for each megabyte."""
    if isinstance(trait, str) and len(trait) > LONG_TEXT:
        return blake2b(trait.encode(), digest_size=_KEY_BYTES).digest()
    return trait


def _readers(
    bundle: Bundle, reads_special_tokens: bool, image_turn: AbstractContextManager[object] | None
) -> tuple[Mapping[Reads, TextTokenizer | ImageReader | Readers], tuple[str, ...]]:
    """Loads the readers of a model's inputs, and the traits on which encodings depend in addition to the model's spec.

    Raises SetupError.
    """
    spec, readers, traits = bundle.spec, dict[Reads, TextTokenizer | ImageReader | Readers](), tuple[str, ...]()
    if spec.image:
        from neuronpipe.tasks.inputs import images  # tokenizers of texts alone need no Pillow

        readers["images"] = read_image = partial(images.read_pixels, spec=spec.image, turn=image_turn)
        traits = (images.LIBRARY_VERSION,)
    if spec.takes_texts:
        facts = spec.facts.get("text_generation")
        chat = (facts.chat_template, facts.template_variables) if isinstance(facts, GenerationFacts) else ()

        def load(written: bytes) -> JsonTokenizer:
            cuts_windows = spec.answers("question_answering")
            return JsonTokenizer(written, *chat, cuts_windows=cuts_windows, reads_special_tokens=reads_special_tokens)

        readers["texts"] = tokenizer = bundle.read_tokenizer(load)
        traits += (LIBRARY_VERSION, bundle.manifest.files[bundle.manifest.tokenizer_file])
    if spec.image and spec.takes_texts:
        readers["both"] = Readers(tokenizer, read_image)
    return readers, traits
