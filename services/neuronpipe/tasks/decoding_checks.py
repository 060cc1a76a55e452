"""Checks the arrays that arrive to be decoded, because any client that reaches the stage may send other arrays."""

import numpy as np

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import Annotations, Task

# The least value of annotations that are not places of tokens, and the limit of the largest value. Places begin at -1.
_RANGES = {
    "place": (0, None),
    "token_ids": (0, "vocabulary"),
    "target_ids": (0, "vocabulary"),
    "window": (0, "vocabulary"),
    "part": (0, None),
    "text_tokens": (1, None),
}


def check_decodable(task: Task, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> None:
    """Checks a graph's outputs, and the annotations that point into texts and vocabularies. Raises InvalidInput."""
    if not outputs and task.annotations.may_stand_alone and len(annotations) == 1:
        any_size = Annotations(dict.fromkeys(task.annotations.sizes, "any"))
        _check_annotations(any_size, annotations[0], 0, model, "annotations[0]")
        return
    if not outputs:
        raise InvalidInput("outputs", "are missing")
    is_annotated = task.annotations.sizes and (annotations or not task.annotations.may_be_missing)
    expected = len(outputs) if is_annotated else 0
    if len(annotations) != expected:
        raise InvalidInput("annotations", f"{len(annotations)} sets for {len(outputs)} outputs, expected {expected}")
    for index, arrays in enumerate(outputs):
        tokens = _check_outputs(model, arrays, f"outputs[{index}]")
        if is_annotated:
            _check_annotations(task.annotations, annotations[index], tokens, model, f"annotations[{index}]")


def check_annotations(expected: Annotations, annotations: ArraySets, model: ModelSpec) -> None:
    """Checks annotations that the task does not declare, because only some inputs have them. Raises InvalidInput."""
    for index, arrays in enumerate(annotations):
        _check_annotations(expected, arrays, 0, model, f"annotations[{index}]")


def _check_outputs(model: ModelSpec, arrays: Arrays, place: str) -> int:
    """Returns the number of tokens; 0 for outputs without a token axis."""
    tokens = 0
    if model.outputs and len(arrays) > len(model.outputs):  # a model that generates declares no outputs
        raise InvalidInput(place, f"{len(arrays)} arrays, the model has {len(model.outputs)} outputs")
    for spec in model.outputs:
        array = arrays.get(spec.name)
        if array is None or array.dtype != np.float32 or array.ndim != len(spec.axes):
            raise InvalidInput(f"{place}.{spec.name}", f"must be float32 with {len(spec.axes)} dimensions")
        for axis, size in zip(spec.axes, array.shape, strict=True):
            if axis == "tokens":
                tokens = tokens or min(size, model.max_tokens)
            if size != (tokens if axis == "tokens" else axis) or not size:
                raise InvalidInput(f"{place}.{spec.name}", f"has the shape {list(array.shape)}, not {list(spec.axes)}")
    return tokens


# Up to this number of values, such as the window of a text, Python is faster than NumPy.
_FEW = 64


def _limits(values: Array) -> tuple[int, int]:
    """Returns the smallest and the largest of some integers."""
    if len(values) > _FEW:
        return int(values.min()), int(values.max())
    numbers = values.tolist()
    return min(numbers), max(numbers)


def _check_annotations(expected: Annotations, arrays: Arrays, tokens: int, model: ModelSpec, place: str) -> None:
    for name, size in expected.sizes.items():
        array = arrays.get(name)
        if array is None or array.dtype != np.int32 or array.ndim != 1:
            raise InvalidInput(f"{place}.{name}", "must be int32 with 1 dimension")
        if size != "any" and len(array) != (tokens if size == "tokens" else size):
            raise InvalidInput(f"{place}.{name}", f"has {len(array)} values; the output has {tokens} tokens")
        if not array.size:
            continue
        minimum, maximum = _RANGES.get(name, (-1, None))
        least, most = _limits(array)
        if least < minimum or (maximum == "vocabulary" and most >= model.vocabulary_size):
            raise InvalidInput(f"{place}.{name}", f"has values below {minimum}, or beyond the vocabulary")
    if "char_end" in expected.sizes and (arrays["char_end"] < arrays["char_start"]).any():
        raise InvalidInput(f"{place}.char_end", "is before char_start")
