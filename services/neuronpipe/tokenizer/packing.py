"""Encoded inputs as they lie in Redis: the message on the wire, its arrays in 16 bits where their numbers allow it.

Arrays are int32 [tokens] with numbers from -1 (no position) on; most vocabularies end below 65,535.
"""

import numpy as np

from neuronpipe.api.v1.stages_pb2 import EncodedInput
from neuronpipe.api.v1.tensors_pb2 import DataType
from neuronpipe.cache.sealing import Codec

# On the wire of the stages a tensor always has a type; without one it is packed.
_PACKED, _WHOLE = DataType.DATA_TYPE_UNSPECIFIED, DataType.DATA_TYPE_INT32
_LEAST, _MOST = -1, 65_534


def pack(payload: bytes) -> bytes:
    """A serialized EncodedInput, smaller."""
    encoded = EncodedInput.FromString(payload)
    for tensors in (*encoded.sequences, *encoded.annotations):
        for tensor in tensors.tensors:
            numbers = np.frombuffer(tensor.data if tensor.data_type == _WHOLE else b"", "<i4")
            if numbers.size and numbers.min() >= _LEAST and numbers.max() <= _MOST:
                tensor.data_type = _PACKED
                tensor.data = (numbers - _LEAST).astype("<u2").tobytes()
    return encoded.SerializeToString()


def unpack(packed: bytes) -> bytes:
    """The serialized EncodedInput again."""
    encoded = EncodedInput.FromString(packed)
    for tensors in (*encoded.sequences, *encoded.annotations):
        for tensor in tensors.tensors:
            if tensor.data_type == _PACKED:
                tensor.data_type = _WHOLE
                tensor.data = (np.frombuffer(tensor.data, "<u2").astype("<i4") + _LEAST).tobytes()
    return encoded.SerializeToString()


PACKING = Codec(pack, unpack)
