"""Converts rows to inputs of a task, and results to columns.

OpenAI's batch files have a request to /v1/embeddings per row; its response has the same custom_id.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.formats import Column, InputRow, Record
from neuronpipe.bulk.transform.request import InputAnswer, InputOutcome
from neuronpipe.bulk.transform.result_columns import result_columns
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.doors.http.bodies import check_body, read_base64
from neuronpipe.doors.http.openai import EMBEDDINGS, EmbeddingsRequest, embeddings_answer, embeddings_inputs
from neuronpipe.doors.http.problems import OPENAI_ERROR, problem_of
from neuronpipe.doors.vectors import embedding_of

TASK = "sentence_embedding"
_HALF_PAIR_PROBLEM = "is no valid Unicode: it has half a surrogate pair"
_BODY: TypeAdapter[Any] = TypeAdapter(EmbeddingsRequest)


class OpenAiRows:
    """Requests to one model. See TaskRows."""

    columns = tuple(map(Column, ("id", "custom_id", "response", "error")))

    def __init__(self, model: str, prompt_names: Sequence[str] = ()) -> None:
        self._model, self._prompt_names = model, prompt_names

    def inputs(self, row: InputRow) -> Sequence[TaskInput]:
        try:
            return embeddings_inputs(self._body(row), self._prompt_names)
        except UnicodeEncodeError:
            raise InvalidInput("body.input", _HALF_PAIR_PROBLEM) from None

    def record(self, row: InputRow, outcomes: Sequence[InputOutcome]) -> Record:
        """See TaskRows. The ids are made from the request's own id, so that they are the same in every run."""
        custom_id = None if isinstance(row, str) else row.get("custom_id")
        mark = hashlib.sha256(str(custom_id).encode(errors="replace")).hexdigest()[:24]
        error = next((outcome for outcome in outcomes if isinstance(outcome, NeuronpipeError)), None)
        if error:
            problem = problem_of(error)
            status, body = problem.codes.status, OPENAI_ERROR.write(problem)
        else:
            answers = [outcome for outcome in outcomes if isinstance(outcome, InputAnswer)]
            vectors = [embedding_of(answer.result) for answer in answers]
            status = 200
            body = embeddings_answer(self._body(row), self._model, vectors, sum(answer.tokens for answer in answers))
        response = {"status_code": status, "request_id": f"req_{mark}", "body": body}
        return {"id": f"batch_req_{mark}", "custom_id": custom_id, "response": response, "error": None}

    def _body(self, row: InputRow) -> EmbeddingsRequest:
        """Returns the request in a row. Raises InvalidInput."""
        if isinstance(row, str):
            raise InvalidInput("row", row)
        if not isinstance(row.get("custom_id"), str):
            raise InvalidInput("custom_id", "must be a text")
        if (method_and_url := (row.get("method"), row.get("url"))) != (EMBEDDINGS.method, EMBEDDINGS.path):
            raise InvalidInput("url", f"{method_and_url} is not served, only POST {EMBEDDINGS.path}")
        body: EmbeddingsRequest = check_body(_BODY, row.get("body"))
        if body.model != self._model:
            raise InvalidInput("body.model", f"is not {self._model!r}, the model of the run")
        if not body.input:
            raise InvalidInput("body.input", "holds none")
        return body


_TYPES: Mapping[int, tuple[tuple[Any, ...], str]] = {
    FieldDescriptor.TYPE_STRING: ((str,), "a text"),
    FieldDescriptor.TYPE_BYTES: ((bytes, str), "bytes, or Base64"),
    FieldDescriptor.TYPE_UINT32: ((int,), "a whole number"),
    FieldDescriptor.TYPE_BOOL: ((bool,), "true or false"),
}

_BYTES_OR_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class TaskRows:
    """Rows with one input each, whose fields are columns. `columns`: the columns of the results."""

    def __init__(
        self,
        task: str,
        template: TaskInput,
        fields: Mapping[str, str],
        kept_columns: Sequence[Column],
        prefix: str,
        *,
        cells_are_texts: bool,
    ) -> None:
        """`template`: the fields that all inputs share. `fields`: the columns of the other fields. `cells_are_texts`:
        the format has no types, so that all values except texts are JSON in a cell.
        """
        self._arguments = (task, template, fields, kept_columns, prefix)
        self._task = task
        self._template = template
        part = getattr(template, task)
        self._fields = [(part.DESCRIPTOR.fields_by_name[field], column) for field, column in fields.items()]
        self._kept = [column.name for column in kept_columns]
        self._cells_are_texts = cells_are_texts
        self._values, kinds = result_columns(task, part)
        if "truncation" in part.DESCRIPTOR.fields_by_name and part.truncation > 1:
            kinds["truncated_tokens"] = "uint32"
        kinds |= {"error": "string", "error_reason": "string"}
        self._names = {name: f"{prefix}{name}" for name in kinds}
        self.columns = [*kept_columns, *(Column(self._names[name], kind) for name, kind in kinds.items())]

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the object picklable, for workers on other machines."""
        return partial(TaskRows, cells_are_texts=self._cells_are_texts), self._arguments

    def inputs(self, row: InputRow) -> Sequence[TaskInput]:
        """Returns the row's inputs. Raises InvalidInput."""
        if isinstance(row, str):
            raise InvalidInput("row", row)
        input = TaskInput()
        input.CopyFrom(self._template)
        part = getattr(input, self._task)
        for field, column in self._fields:
            self._set(part, field, column, row.get(column))
        return [input]

    def record(self, row: InputRow, outcomes: Sequence[InputOutcome]) -> Record:
        """Returns the row of results. `outcomes`: the outcomes of the row's inputs, or its own error."""
        cells = {} if isinstance(row, str) else row
        record: dict[str, Any] = {name: cells.get(name) for name in self._kept}
        record |= dict.fromkeys(self._names.values())
        (outcome,) = outcomes
        if isinstance(outcome, NeuronpipeError):
            values: Mapping[str, Any] = {"error": outcome.message, "error_reason": outcome.reason}
        else:
            values = self._values(outcome.result)
            if "truncated_tokens" in self._names:
                values = {**values, "truncated_tokens": outcome.truncated_tokens}
        return record | {self._names[name]: value for name, value in values.items()}

    def _set(self, part: Any, field: FieldDescriptor, column: str, value: Any) -> None:
        """Sets a field of an input. Raises InvalidInput."""
        try:
            value = value.as_py() if hasattr(value, "as_py") else value
        except (ValueError, OverflowError):
            raise InvalidInput(f"column {column!r}", "is not UTF-8, or no value of Python") from None
        if value is None:
            raise InvalidInput(f"column {column!r}", "is missing")
        if self._cells_are_texts and (field.is_repeated or field.type not in _BYTES_OR_TEXT):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise InvalidInput(f"column {column!r}", "is no valid JSON") from None
        if field.is_repeated:
            if not isinstance(value, list):
                raise InvalidInput(f"column {column!r}", "must be a list")
            getattr(part, field.name).extend(_checked(element, field, column) for element in value)
        else:
            setattr(part, field.name, _checked(value, field, column))


# Reads a row as an input, and writes its result as a row.
RowTask: TypeAlias = OpenAiRows | TaskRows


def _checked(value: Any, field: FieldDescriptor, column: str) -> Any:
    types, words = _TYPES[field.type]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise InvalidInput(f"column {column!r}", f"must be {words}")
    if isinstance(value, str) and field.type == FieldDescriptor.TYPE_BYTES:
        try:
            return read_base64(value)
        except ValueError as error:
            raise InvalidInput(f"column {column!r}", str(error)) from None
    if isinstance(value, str) and not value.isascii() and _HALF_PAIR.search(value):
        raise InvalidInput(f"column {column!r}", _HALF_PAIR_PROBLEM)
    if isinstance(value, int) and not 0 <= value < 1 << 32:
        raise InvalidInput(f"column {column!r}", "must be from 0 to 4294967295")
    return value


def is_failed(outcomes: Sequence[InputOutcome]) -> bool:
    return not all(isinstance(outcome, InputAnswer) for outcome in outcomes)
