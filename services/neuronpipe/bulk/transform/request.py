"""What a run shall do, and what an engine answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.errors import NeuronpipeError


@dataclass(frozen=True, slots=True)
class TransformRequest:
    """The rows, the model's work on them, and where results go.

    `inputs`: files, or patterns of their names. `columns`: field of the task's input → column that holds it. `keep`:
    columns that results are joined to. `options`: fields of the task's input that all rows share, as JSON. `prefix`: of
    the result's columns. `input_format`, `output_format`: empty where the files' names say it. `max_errors`: rows that
    may fail; None for any number. `price_per_hour`: of the machine, 0 if unknown.
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
    """The model that answers: one version of it. `batching`: what makes the batches, as results' last bits depend on
    them; empty where that is not known.
    """

    name: str
    version: str
    digest: str
    tasks: Sequence[str]
    batching: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one input, and its tokens."""

    result: TaskResult
    tokens: int
    truncated_tokens: int
    padded_tokens: int


# What became of one input.
Outcome: TypeAlias = Answer | NeuronpipeError


class Engine(Protocol):
    """What runs inputs: a pipeline in this process, or a gateway."""

    model: ModelFacts
    # Rows that are handed over at once, and how often that may happen at a time.
    window_rows: int
    windows_in_flight: int

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[Outcome]:
        """What became of each input, in their order. Raises what ends a run, as Unavailable and ModelNotFound."""
