"""An engine over a gateway that runs the model."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.request import InputAnswer, InputOutcome, ModelFacts
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    Unavailable,
    WrongTask,
)
from neuronpipe.core.status import from_status
from neuronpipe.platform.tls import TlsFiles

# Maximum number of windows in flight. A window is a stream, of which a gateway computes 64 rows at once
# (max_stream_in_flight).
_WINDOWS = 4
_WINDOW_ROWS = 256
# Errors that may pass by waiting. Other errors are the row's own, or end the run.
_PASSING = (Overloaded, Unavailable, Cancelled, DeadlineExceeded)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0


class FarEngine:
    """See Engine. Rows that a gateway refuses because of overload, or that it lost, are sent again."""

    windows_in_flight = _WINDOWS
    window_rows = _WINDOW_ROWS

    def __init__(self, client: AsyncClient, model: ModelFacts, patience_s: float) -> None:
        """`patience_s`: the longest wait for a gateway that does not answer."""
        self.model = model
        self._client = client
        self._patience_s = patience_s

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[InputOutcome]:
        """See Engine. Raises the reason why no gateway answers: Unavailable, Unauthenticated, ModelNotFound."""
        outcomes: dict[int, InputOutcome] = {}
        # Rows of similar length are in flight together, so that batches are made of them.
        open_rows = sorted(range(len(inputs)), key=lambda row: inputs[row].ByteSize())
        wait_s, last_answer_s = _FIRST_WAIT_S, time.monotonic()
        while open_rows:
            answered, refusal = await self._send(inputs, open_rows)
            outcomes |= answered
            open_rows = [row for row in open_rows if row not in answered]
            if answered:
                wait_s, last_answer_s = _FIRST_WAIT_S, time.monotonic()
            if open_rows and refusal:
                if time.monotonic() > last_answer_s + self._patience_s:
                    raise refusal
                retry_after_s = refusal.retry_after_s if isinstance(refusal, Overloaded) else 0.0
                # Randomized, because many windows are refused at once.
                await asyncio.sleep(max(wait_s, retry_after_s) * random.uniform(1, 1.5))  # noqa: S311
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        return [outcomes[row] for row in range(len(inputs))]

    async def _send(
        self, inputs: Sequence[TaskInput], rows: Sequence[int]
    ) -> tuple[dict[int, InputOutcome], NeuronpipeError | None]:
        """Sends rows. Returns the outcomes, and the reason why other rows have no answer. Raises errors that end the
        run.
        """
        requests = [
            InferRequest(
                model=self.model.name,
                version=self.model.version,
                input=inputs[row],
                request_id=str(row),
                priority=Priority.PRIORITY_BULK,
            )
            for row in rows
        ]
        outcomes: dict[int, InputOutcome] = {}
        refusal: NeuronpipeError | None = None
        try:
            async for answer in self._client.infer_stream(requests):
                outcome = _outcome(answer.outcome)
                if isinstance(outcome, _PASSING):
                    refusal = outcome
                elif isinstance(outcome, InputAnswer | InvalidInput | WrongTask | InternalError):
                    outcomes[int(answer.request_id)] = outcome
                else:
                    raise outcome
        except _PASSING as error:
            refusal = error
        return outcomes, refusal or Unavailable("the gateway ended the call without answers to all rows")


def _outcome(outcome: InferOutcome) -> InputOutcome:
    if outcome.HasField("error"):
        return from_status(outcome.error)
    response = outcome.response
    usage = response.usage
    return InputAnswer(response.result, usage.tokens, usage.truncated_tokens, usage.padded_tokens)


@asynccontextmanager
async def running_far_engine(
    target: str, name: str, version: str, patience_s: float, tls: TlsFiles | None
) -> AsyncIterator[FarEngine]:
    """Yields the engine of a model, whose version stays the same for the run.

    Raises the error of asking for the model.
    """
    async with AsyncClient(target, timeout_s=patience_s, tls=tls) as client:
        model = await client.get_model(name, version)
        tasks = list(dict.fromkeys([model.task, *model.tasks]))
        facts = ModelFacts(model.name, model.version, model.digest, tasks, prompt_names=model.prompt_names)
        yield FarEngine(client, facts, patience_s)
