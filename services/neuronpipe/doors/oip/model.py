"""What every model of the protocol has, whether it is a task or takes token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.items import EncodedInput
from neuronpipe.core.packed import Packed
from neuronpipe.doors.oip.tensors import Tensor, TensorSpec
from neuronpipe.gateway.inference import InferenceResult

# The value of a request's parameter.
Parameter = bool | int | float | str
# An input of the pipeline: a task's, or one that a caller encoded.
RowInput = tuple[Packed[TaskInput], EncodedInput | None]


class TensorModel(Protocol):
    """The inputs, outputs and parameters of a model; `parameters`: what each may be, by its name."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    @property
    def parameters(self) -> Mapping[str, str]: ...

    def read_rows(
        self, tensors: Mapping[str, Tensor], rows: int, parameters: Mapping[str, Parameter]
    ) -> list[RowInput]:
        """An input of the pipeline for each row. `parameters` has known names only. Raises InvalidInput."""

    def write(
        self,
        results: Sequence[InferenceResult],
        wanted: Sequence[TensorSpec],
        tensors: Mapping[str, Tensor],
        max_bytes: int,
    ) -> list[Tensor]:
        """The outputs that are wanted, from the results of all rows. `tensors`: the inputs. Raises InvalidInput for an
        output of more than `max_bytes`.
        """


def row_field(name: str, row: int, rows: int) -> str:
    """How an error names a row's part of an input."""
    return f"{name}[{row}]" if rows > 1 else name


def shown(word: Any) -> str:
    """A caller's word as an error repeats it."""
    text = f"{word!r}"
    return text if len(text) <= 66 else f"{text[:64]}…"
