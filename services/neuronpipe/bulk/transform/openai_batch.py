"""OpenAI's batch files: a request to /v1/embeddings a row, its response under the same custom_id."""

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.formats.base import Column, Record, Row
from neuronpipe.bulk.transform.request import Answer, Outcome
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.doors.http.bodies import check_body
from neuronpipe.doors.http.openai import EMBEDDINGS, EmbeddingsRequest, embeddings_answer, embeddings_inputs
from neuronpipe.doors.http.problems import OPENAI_ERROR, problem_of

TASK = "sentence_embedding"
_BODY: TypeAdapter[Any] = TypeAdapter(EmbeddingsRequest)


class OpenAiRows:
    """Requests to one model. See RowTask."""

    columns = tuple(map(Column, ("id", "custom_id", "response", "error")))

    def __init__(self, model: str) -> None:
        self._model = model

    def inputs(self, row: Row) -> Sequence[TaskInput]:
        """See RowTask."""
        return embeddings_inputs(self._body(row))

    def record(self, row: Row, outcomes: Sequence[Outcome]) -> Record:
        """See RowTask. The ids follow from the request's own, so that they are the same in every run."""
        custom_id = None if isinstance(row, str) else row.get("custom_id")
        mark = hashlib.sha256(str(custom_id).encode(errors="replace")).hexdigest()[:24]
        error = next((one for one in outcomes if isinstance(one, NeuronpipeError)), None)
        if error:
            problem = problem_of(error)
            status, body = problem.codes.status, OPENAI_ERROR.write(problem)
        else:
            answers = [one for one in outcomes if isinstance(one, Answer)]
            vectors = [one.result.sentence_embedding for one in answers]
            status = 200
            body = embeddings_answer(self._body(row), vectors, sum(one.tokens for one in answers))
        response = {"status_code": status, "request_id": f"req_{mark}", "body": body}
        return {"id": f"batch_req_{mark}", "custom_id": custom_id, "response": response, "error": None}

    def _body(self, row: Row) -> EmbeddingsRequest:
        """The request in a row. Raises InvalidInput."""
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
