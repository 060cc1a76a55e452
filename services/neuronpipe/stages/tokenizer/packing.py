"""The format of encoded inputs in Redis: the wire message, with arrays as 16-bit numbers if their values allow it.

Token ids and positions are int32 [tokens]. The lowest value is -1 (no position). Most vocabularies end below 65,535.
"""

from collections.abc import Iterable

import numpy as np

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.tensors_pb2 import DataType, TensorSet
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import to_arrays, to_tensor_set
from neuronpipe.platform.cache.sealing import ValueCodec

# Between the stages a tensor always has a type; a tensor without one is packed.
_PACKED, _WHOLE = DataType.DATA_TYPE_UNSPECIFIED, DataType.DATA_TYPE_INT32
_LEAST, _MOST = -1, 65_534
# What an encoded input, each of its sets, and each of its arrays takes in memory besides the arrays' numbers (measured
# with tracemalloc on CPython 3.11 and NumPy 2, 2026-11-22: 312, 184 and 163 bytes).
_VALUE_BYTES, _SET_BYTES, _ARRAY_BYTES = 320, 184, 164


def pack(encoded: EncodedInput) -> bytes:
    """The bytes of an encoded input, without its cache outcome."""
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
    """The encoded input of such bytes. Its arrays are read-only."""
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
    """The memory that an encoded input takes."""
    sets = (*encoded.sequences.arrays, *encoded.annotations.arrays)
    return _VALUE_BYTES + sum(
        _SET_BYTES + sum(_ARRAY_BYTES + array.nbytes for array in arrays.values()) for arrays in sets
    )


def _arrays(sets: Iterable[TensorSet]) -> TensorSets:
    return TensorSets(arrays=[to_arrays(tensors) for tensors in sets])


PACKING: ValueCodec[EncodedInput] = ValueCodec(pack, unpack, size_bytes)
