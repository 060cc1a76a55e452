"""Runs a job: reads its inputs, sends them to the gateway, writes what came of them."""

import asyncio
from collections.abc import Sequence

from google.protobuf import json_format

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest
from neuronpipe.api.v1.jobs_pb2 import JobResult, SubmitInferenceRequest
from neuronpipe.bulk.jobs.gateway import Gateway
from neuronpipe.bulk.jobs.invocations import Invoker, object_failed
from neuronpipe.bulk.jobs.job import Job, Progress
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.storage.objects import Storage, StorageError
from neuronpipe.platform.storage.uris import ObjectUri

# Requests of one job that wait for a place at the gateway at once.
_LANES = 64


class Runner:
    """Runs jobs. `max_input_bytes`: of an object; `max_result_bytes`: of outcomes that are in no object."""

    def __init__(
        self, gateway: Gateway, invoker: Invoker, storage: Storage, max_input_bytes: int, max_result_bytes: int
    ) -> None:
        self._gateway = gateway
        self._invoker = invoker
        self._storage = storage
        self._max_input_bytes = max_input_bytes
        self._max_result_bytes = max_result_bytes

    async def run(self, job: Job, progress: Progress, trace: SpanContext | None) -> JobResult:
        """What comes of a job. Raises NeuronpipeError where it fails as a whole."""
        if job.invocation:
            return await self._invoker.run(job, progress, trace)
        submitted = SubmitInferenceRequest.FromString(job.request)
        inputs = await self._inputs(submitted)
        outcomes = await self._outcomes(job, inputs, progress, trace)
        failed = sum(outcome.HasField("error") for outcome in outcomes)
        result = JobResult(succeeded=len(outcomes) - failed, failed=failed)
        if submitted.output_uri:
            result.output_uri = submitted.output_uri
            await self._write(submitted.output_uri, outcomes)
        else:
            self._add_outcomes(result, outcomes)
        return result

    async def _inputs(self, submitted: SubmitInferenceRequest) -> "Sequence[InferRequest | InvalidInput]":
        if not submitted.input_uri:
            return submitted.requests
        return await asyncio.to_thread(self._read_inputs, submitted.input_uri)

    def _read_inputs(self, uri: str) -> "list[InferRequest | InvalidInput]":
        try:
            data = self._storage.read(ObjectUri.parse(uri), self._max_input_bytes)
        except StorageError as error:
            raise object_failed("input_uri", uri, error) from error
        return [_read_line(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]

    async def _outcomes(
        self,
        job: Job,
        inputs: "Sequence[InferRequest | InvalidInput]",
        progress: Progress,
        trace: SpanContext | None,
    ) -> list[InferOutcome]:
        outcomes = [InferOutcome() for _ in inputs]
        numbers = iter(range(len(inputs)))

        async def lane() -> None:
            for number in numbers:
                one = inputs[number]
                if isinstance(one, InvalidInput):
                    outcomes[number].error.CopyFrom(to_status(one))
                else:
                    one.request_id = one.request_id or f"{job.id}/{number}"
                    outcomes[number] = await self._gateway.outcome(one, job.tenant, trace, job.limit_s, progress.begin)
                progress.completed += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(min(_LANES, len(inputs))):
                group.create_task(lane())
        return outcomes

    async def _write(self, uri: str, outcomes: Sequence[InferOutcome]) -> None:
        def write() -> None:
            lines = [
                json_format.MessageToJson(outcome, preserving_proto_field_name=True, indent=None, ensure_ascii=False)
                for outcome in outcomes
            ]
            self._storage.write(ObjectUri.parse(uri), "".join(f"{line}\n" for line in lines).encode())

        try:
            await asyncio.to_thread(write)
        except StorageError as error:
            raise object_failed("output_uri", uri, error) from error

    def _add_outcomes(self, result: JobResult, outcomes: Sequence[InferOutcome]) -> None:
        """Those that would make the result larger than its limit become errors, as in InferBatch."""
        size_bytes = 0
        for outcome in outcomes:
            outcome_bytes = outcome.ByteSize()
            if size_bytes + outcome_bytes > self._max_result_bytes:
                problem = f"the result is larger than {self._max_result_bytes} bytes, the limit; give an output_uri"
                result.outcomes.add(error=to_status(InvalidInput("requests", problem)))
                if outcome.HasField("response"):
                    result.succeeded, result.failed = result.succeeded - 1, result.failed + 1
                continue
            size_bytes += outcome_bytes
            result.outcomes.append(outcome)


def _read_line(number: int, line: bytes) -> InferRequest | InvalidInput:
    try:
        return json_format.Parse(line, InferRequest())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError):
        return InvalidInput("input_uri", f"line {number} is no InferRequest in JSON")
