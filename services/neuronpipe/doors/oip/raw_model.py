"""A model's graph for callers who tokenize: they send token ids or pixels, and get the outputs of the graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.model import ADAPTER, ModelSpec
from neuronpipe.core.packed import TensorSets, pack_input
from neuronpipe.core.tensors import Array
from neuronpipe.doors.oip.tensors import NamedTensor, Parameter, RowInput, TensorSpec, padded, row_field
from neuronpipe.gateway.requests import InferenceResult

_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
_OPTIONAL = (_MASK, _TYPES)
# Most models have the types 0 and 1. A type without a vector in the model could end the whole batch.
_MAX_TYPE = 1
_MAX_INT32 = (1 << 31) - 1


class RawModel:
    """See TaskModel. A row of tokens ends where its mask does; its outputs are zero beyond this end."""

    parameters: Mapping[str, str] = {}

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        names = [name for name in spec.inputs if name != ADAPTER]  # the model's name says which
        if spec.image:
            self.inputs = [TensorSpec(name, "UINT8", (3, *spec.image.size)) for name in spec.inputs]
        else:
            self.inputs = [TensorSpec(name, "INT64", (-1,), name in _OPTIONAL, also=("INT32",)) for name in names]
        self.outputs = [
            TensorSpec(output.name, "FP32", tuple(-1 if axis == "tokens" else axis for axis in output.axes))
            for output in spec.outputs
        ]

    def read_rows(
        self, tensors: Mapping[str, NamedTensor], rows: int, parameters: Mapping[str, Parameter], max_input_bytes: int
    ) -> list[RowInput]:
        """See TaskModel."""
        arrays = {name: tensor.values for name, tensor in tensors.items()}
        if self._spec.image:
            sequences = [{name: array[row] for name, array in arrays.items()} for row in range(rows)]
        else:
            sequences = self._sequences(arrays, rows)
        empty, tokens_of = pack_input(TaskInput()), self._spec.tokens_of
        return [(empty, EncodedInput(TensorSets(arrays=[arrays]), tokens=tokens_of(arrays))) for arrays in sequences]

    def write(
        self,
        results: Sequence[InferenceResult],
        wanted: Sequence[TensorSpec],
        tensors: Mapping[str, NamedTensor],
        max_bytes: int,
    ) -> list[NamedTensor]:
        """See TaskModel."""
        outputs = [result.outputs.arrays[0] for result in results]
        tokens = 0 if self._spec.image else tensors[_IDS].shape[1]
        for spec in wanted:
            spec.check_size(_shape(spec, len(outputs), tokens), max_bytes)
        return [_stacked(spec, [arrays[spec.name] for arrays in outputs], tokens) for spec in wanted]

    def _sequences(self, arrays: Mapping[str, Array], rows: int) -> list[dict[str, Array]]:
        """Returns each row's arrays, int32 [tokens], up to the end of its mask. Raises InvalidInput."""
        width = arrays[_IDS].shape[1]
        for name, array in arrays.items():
            if array.shape[1] != width:
                raise InvalidInput(name, f"{array.shape[1]} tokens in a row, {_IDS} has {width}")
            highest = _MAX_TYPE if name == _TYPES else _MAX_INT32
            if array.size and (array.min() < 0 or array.max() > highest):
                raise InvalidInput(name, f"values from {array.min()} to {array.max()}, must be from 0 to {highest}")
        lengths = _lengths(arrays[_MASK], rows) if _MASK in arrays else [width] * rows
        # Types that are all zero are left out, as by the tokenizer, so that equal sequences are equal.
        taken = {
            name: array.astype(np.int32)
            for name, array in arrays.items()
            if name != _MASK and (name != _TYPES or array.any())
        }
        return [{name: array[row, :length] for name, array in taken.items()} for row, length in enumerate(lengths)]


def _lengths(mask: Array, rows: int) -> list[int]:
    """Returns the number of tokens of each row. Raises InvalidInput if the mask is not 1 and then 0."""
    lengths = mask.sum(axis=1)
    for row, wrong in enumerate((mask != (np.arange(mask.shape[1]) < lengths[:, None])).any(axis=1)):
        if wrong:
            raise InvalidInput(row_field(_MASK, row, rows), "must be ones and then zeros: padding is on the right")
    counted: list[int] = lengths.tolist()
    return counted


def _shape(spec: TensorSpec, rows: int, tokens: int) -> tuple[int, ...]:
    return rows, *(tokens if dim == -1 else dim for dim in spec.dims)


def _stacked(spec: TensorSpec, arrays: Sequence[Any], tokens: int) -> NamedTensor:
    shape = _shape(spec, len(arrays), tokens)
    if all(array.shape == shape[1:] for array in arrays):
        return NamedTensor(spec.name, spec.datatype, shape, np.stack(arrays))
    return padded(spec, shape, arrays)
