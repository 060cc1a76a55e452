"""The request for a run, and the answers of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.errors import NeuronpipeError


@dataclass(frozen=True, slots=True)
class TransformRequest:
    """The rows, the model's work on them, and the place of the results.

    - `inputs`: files, or patterns of their names.
    - `columns`: field of the task's input → column that holds it.
    - `keep`: columns that are copied to the results.
    - `options`: fields of the task's input that all rows share, as JSON.
    - `prefix`: begins the names of the result's columns.
    - `input_format`, `output_format`: empty if the filenames say it.
    - `max_errors`: rows that may fail; None for any number.
    - `price_per_hour`: the price of the machine; 0 if unknown.
    """

    inputs: Sequence[str]
    output: str
    model: str
    version: str = ""
    task: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] = ()
    options: str = "{}"
    prefix: str = ""
    input_format: str = ""
    output_format: str = ""
    shard_rows: int = 10_000
    max_errors: int | None = None
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The version of a model that answers. `batching`: the settings that determine the batches, because results' last
    bits depend on them; empty if unknown.
    """

    name: str
    version: str
    digest: str
    tasks: Sequence[str]
    batching: str = ""
    prompt_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class InputAnswer:
    result: TaskResult
    tokens: int
    truncated_tokens: int
    padded_tokens: int


# The outcome of one input.
InputOutcome: TypeAlias = InputAnswer | NeuronpipeError


class Engine(Protocol):
    """The contract of an engine, which runs inputs: a pipeline in this process, or a gateway."""

    model: ModelFacts
    # Rows that are handed over at once, and the maximum number of hand-overs at a time.
    window_rows: int
    windows_in_flight: int

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[InputOutcome]:
        """Returns the outcome of each input, in order. Raises errors that end a run, such as Unavailable and
        ModelNotFound.
        """
