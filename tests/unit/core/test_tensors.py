"""core/tensors.py: arrays cross the wire unchanged, and bytes that are no array are refused."""

import numpy as np
import pytest

from neuronpipe.api.v1.tensors_pb2 import DataType, Tensor, TensorSet
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Array, to_arrays, to_tensor_set

_ARRAYS = {
    "float32 matrix": np.array([[1.5, -0.0, np.inf], [np.nan, 3.4e38, 1e-45]], np.float32),
    "int32 vector": np.array([-(2**31), 0, 2**31 - 1], np.int32),
    "int64 vector": np.array([-(2**63), 2**63 - 1], np.int64),
    "scalar": np.array(7, np.int32),
    "empty vector": np.array([], np.float32),
    "matrix without columns": np.zeros((2, 0), np.float32),
    "transposed": np.arange(6, dtype=np.int32).reshape(2, 3).T,
    "every second": np.arange(6, dtype=np.int32)[::2],
}


def _tensor(data: bytes, shape: list[int]) -> TensorSet:
    return TensorSet(tensors=[Tensor(name="t", data_type=DataType.DATA_TYPE_INT32, shape=shape, data=data)])


@pytest.mark.parametrize("array", _ARRAYS.values(), ids=_ARRAYS)
def test_an_array_comes_back_unchanged(array: Array) -> None:
    back = to_arrays(to_tensor_set({"t": array}))["t"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_names_and_their_order_come_back() -> None:
    arrays = {name: np.zeros(1, np.int32) for name in ("second", "first")}
    assert list(to_arrays(to_tensor_set(arrays))) == ["second", "first"]


def test_bytes_are_little_endian_in_row_major_order() -> None:
    (tensor,) = to_tensor_set({"t": np.array([[1, 256], [-1, 2]], np.int32)}).tensors
    assert tensor.data.hex(" ", 4) == "01000000 00010000 ffffffff 02000000"


def test_an_array_from_the_wire_cannot_be_written_to() -> None:
    assert not to_arrays(_tensor(b"\0" * 4, [1]))["t"].flags.writeable


def test_a_dtype_that_the_wire_does_not_have_is_a_fault_of_our_own() -> None:
    with pytest.raises(KeyError):
        to_tensor_set({"t": np.zeros(1, np.float64)})


@pytest.mark.parametrize(
    ("data", "shape", "expected"),
    [
        (b"\0" * 7, [2], "tensor t: 7 bytes, its shape takes 8"),
        (b"\0" * 9, [2], "tensor t: 9 bytes, its shape takes 8"),
        (b"", [2], "tensor t: 0 bytes, its shape takes 8"),
        (b"\0" * 4, [0], "tensor t: 4 bytes, its shape takes 0"),
        (b"", [], "tensor t: 0 bytes, its shape takes 4"),
        (b"\0" * 4, [2**32 - 1] * 3, f"tensor t: 4 bytes, its shape takes {4 * (2**32 - 1) ** 3}"),
    ],
)
def test_bytes_that_do_not_fill_the_shape_are_refused(data: bytes, shape: list[int], expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        to_arrays(_tensor(data, shape))
    assert caught.value.message == expected


@pytest.mark.parametrize(
    "shape", [[1] * 65, [0] + [2**32 - 1] * 3], ids=["65 dimensions", "empty, with giant dimensions"]
)
def test_a_shape_that_no_array_can_have_is_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidInput, match="tensor t"):
        to_arrays(_tensor(b"" if 0 in shape else b"\0" * 4, shape))


@pytest.mark.parametrize("number", [0, 99], ids=["unspecified", "of a newer version"])
def test_an_unknown_data_type_is_refused(number: int) -> None:
    message = TensorSet.FromString(TensorSet(tensors=[Tensor(name="t", shape=[1], data=b"\0" * 4)]).SerializeToString())
    message.tensors[0].MergeFromString(bytes([2 << 3, number]))  # field 2 is data_type
    with pytest.raises(InvalidInput, match=f"tensor t: data type {number} is not known"):
        to_arrays(message)
