"""Runs a job: reads its inputs, sends them to the gateway with bulk priority, and writes the outcomes, in pieces."""

import asyncio
import codecs
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from itertools import islice
from typing import BinaryIO, TypeAlias, cast

from google.protobuf import json_format
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest
from neuronpipe.api.v1.jobs_pb2 import JobResult, SubmitInferenceRequest
from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.invocation import Invoker
from neuronpipe.bulk.jobs.job import JobProgress, StoredJob
from neuronpipe.bulk.jobs.objects import JobObjects
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.errors import InvalidInput, Overloaded, Unavailable
from neuronpipe.core.files import lines_of
from neuronpipe.core.parsing import too_much
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import SpanContext

# The longest line of a file, with its end: an image of 10 MiB as Base64 has room.
_MAX_LINE_BYTES = 16 << 20
# Inputs that are read at once, and run side by side: fewer if they or their outcomes are large.
_FIRST_INPUTS, _MOST_INPUTS = 32, 256
_READ_BYTES, _OUTCOME_BYTES = 1 << 20, 4 << 20
# Maximum number of jobs at once whose inputs exceed this size.
_LARGE_BYTES, _LARGE_AT_ONCE = 4 << 20, 2
# Bytes of outcomes in memory, before they go to a temporary file.
_SPOOLED_BYTES = 1 << 20
# Inputs in a file that are always allowed without an output_uri, as many as a job has without a file.
_FEW_INPUTS = 1000

# A request, or a line with its number.
_Given: TypeAlias = InferRequest | tuple[int, bytes]


class Runner:
    """Runs jobs within the limits of a worker's settings."""

    def __init__(self, gateway: BulkGateway, invoker: Invoker, objects: JobObjects, settings: WorkerSettings) -> None:
        self._gateway, self._invoker, self._objects = gateway, invoker, objects
        self._max_result_bytes, self._max_lines = settings.max_result_bytes, settings.max_input_lines
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def run(self, job: StoredJob, progress: JobProgress, trace: SpanContext | None) -> JobResult:
        """Runs a job, and returns its result. Raises NeuronpipeError if it fails as a whole, and Unavailable if an
        object cannot be read now.
        """
        if job.invocation:  # the two kinds of jobs
            return await self._invoker.run(job, progress, trace)
        submitted = SubmitInferenceRequest.FromString(job.request)
        requests: Iterator[_Given] = iter(submitted.requests)
        count = len(submitted.requests)
        with ExitStack() as opened:
            file: BinaryIO | None = None
            if submitted.input_uri:
                file = opened.enter_context(await self._objects.open(submitted.input_uri))
                modified_ns = _modified_ns(file)
                count = await asyncio.to_thread(self._count_lines, file, submitted)
                requests = _lines(file)
            outcomes = opened.enter_context(closing(_Outcomes(submitted.output_uri, count, self._max_result_bytes)))
            while next_inputs := await asyncio.to_thread(lambda: list(_next_of(requests, outcomes.inputs_at_once))):
                new_outcomes = await self._infer(job, outcomes.count, next_inputs, progress, trace)
                await asyncio.to_thread(outcomes.add, new_outcomes)
            if file and _modified_ns(file) != modified_ns:
                raise Unavailable("input_uri: the object has changed while the job read it")
            if outcomes.file:
                await self._objects.write(submitted.output_uri, outcomes.file, progress)
            return outcomes.result

    async def _infer(
        self, job: StoredJob, first: int, requests: Sequence[_Given], progress: JobProgress, trace: SpanContext | None
    ) -> list[InferOutcome]:
        """Runs some inputs, and returns their outcomes. `first`: the number of inputs before them."""

        async def outcome(number: int, request: InferRequest | InvalidInput) -> InferOutcome:
            if isinstance(request, InvalidInput):
                result = InferOutcome(error=to_status(request))
            else:
                await progress.leased()
                request.request_id = request.request_id or f"{job.id}/{number}"
                result = await self._gateway.outcome(request, job.tenant, trace, job.limit_s, progress.begin)
            progress.completed += 1
            return result

        async with self._large if sum(map(_size, requests)) > _LARGE_BYTES else nullcontext():
            inputs = await asyncio.to_thread(lambda: list(map(_read_input, requests)))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(outcome(*numbered)) for numbered in enumerate(inputs, first)]
            return [task.result() for task in tasks]

    def _count_lines(self, file: BinaryIO, submitted: SubmitInferenceRequest) -> int:
        """Returns the number of lines of a file. Raises InvalidInput if there are too many."""
        limit, setting = self._max_lines, "max_input_lines"
        if not submitted.output_uri:
            fitting_lines = max(_FEW_INPUTS, self._max_result_bytes // _too_large(self._max_result_bytes).ByteSize())
            limit, setting = min((limit, setting), (fitting_lines, "max_result_bytes, without an output_uri"))
        count = sum(1 for _ in islice(_all_lines(file), limit + 1))
        if count > limit:
            problem = f"{submitted.input_uri} has more than {limit} lines, the limit (the worker's {setting})"
            raise InvalidInput("input_uri", f"{problem}; use several jobs, or a batch transform")
        file.seek(0)
        return count


def _modified_ns(file: BinaryIO) -> int:
    """Returns the time of the last write to a file; 0 for the worker's own copy of an object."""
    return 0 if isinstance(file, tempfile.SpooledTemporaryFile) else os.fstat(file.fileno()).st_mtime_ns


def _all_lines(file: BinaryIO) -> Iterator[bytes]:
    try:
        for line, _ in lines_of(file, _MAX_LINE_BYTES):
            yield line
    except OSError as error:
        raise Unavailable("input_uri: the object cannot be read now") from error


def _lines(file: BinaryIO) -> Iterator[_Given]:
    """Yields the lines that are not blank, with their numbers from 1 on."""
    for number, line in enumerate(_all_lines(file), 1):
        if line := line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
            yield number, line


def _size(entry: _Given) -> int:
    return len(entry[1]) if isinstance(entry, tuple) else 0


def _next_of(requests: Iterator[_Given], count: int) -> Iterator[_Given]:
    """Yields the next inputs: up to `count`, and fewer if they are large."""
    left_bytes = _READ_BYTES
    for entry in islice(requests, count):
        yield entry
        left_bytes -= _size(entry)
        if left_bytes < 0:
            return


def _read_input(entry: _Given) -> InferRequest | InvalidInput:
    if isinstance(entry, InferRequest):
        return entry
    number, line = entry
    problem = too_much(line) if len(line) <= _MAX_LINE_BYTES else f"is longer than {_MAX_LINE_BYTES} bytes, the limit"
    if problem:
        return InvalidInput("input_uri", f"line {number} {problem}")
    try:
        return json_format.Parse(line, InferRequest())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError):
        return InvalidInput("input_uri", f"line {number} is no InferRequest in JSON")


class _Outcomes:
    """The outcomes of a job in the order of its inputs: in a file, for an object, or in the result itself."""

    def __init__(self, output_uri: str, max_outcomes: int, max_bytes: int) -> None:
        """`max_outcomes`: their limit. `max_bytes`: the limit of the result. Beyond it, outcomes become errors,
        as in InferBatch. Space for these errors is reserved, unless `max_bytes` is too small for anything else then.
        """
        self.result = JobResult(output_uri=output_uri)
        file = tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) if output_uri else None  # noqa: SIM115 (see close)
        self.file = cast(BinaryIO | None, file)
        self.inputs_at_once = _FIRST_INPUTS
        self._too_large = _too_large(max_bytes)
        self._left_bytes = max_bytes
        self._left = max_outcomes if max_outcomes * _size_in_list(self._too_large) <= max_bytes else 0

    @property
    def count(self) -> int:
        return self.result.succeeded + self.result.failed

    def close(self) -> None:
        if self.file:
            with suppress(OSError):  # a full disk fails again for the outcomes that it has refused
                self.file.close()

    def add(self, outcomes: Sequence[InferOutcome]) -> None:
        """Adds outcomes. Raises Overloaded if there is no room for a file."""
        mean_bytes = sum(map(_size_in_list, outcomes)) // len(outcomes)
        self.inputs_at_once = max(1, min(_MOST_INPUTS, _OUTCOME_BYTES // mean_bytes))
        for outcome in outcomes:
            written = outcome if self.file else self._within_limit(outcome)
            self.result.failed += written.HasField("error")
            self.result.succeeded += written.HasField("response")
        if self.file:
            lines = [
                json_format.MessageToJson(outcome, preserving_proto_field_name=True, indent=None, ensure_ascii=False)
                for outcome in outcomes
            ]
            try:
                self.file.write("".join(f"{line}\n" for line in lines).encode())
                self.file.flush()
            except OSError as error:
                raise Overloaded("the worker has no room left for outcomes in its temporary folder", 60) from error

    def _within_limit(self, outcome: InferOutcome) -> InferOutcome:
        self._left = max(0, self._left - 1)
        if _size_in_list(outcome) + self._left * _size_in_list(self._too_large) > self._left_bytes:
            outcome = self._too_large
        self._left_bytes -= _size_in_list(outcome)
        self.result.outcomes.append(outcome)
        return outcome


def _size_in_list(outcome: InferOutcome) -> int:
    return outcome.ByteSize() + 5


def _too_large(max_bytes: int) -> InferOutcome:
    """Returns the replacement of an outcome that is too large; short, because there may be thousands."""
    problem = f"requests: the result is larger than {max_bytes} bytes, the limit; give an output_uri"
    return InferOutcome(error=Status(code=code_pb2.INVALID_ARGUMENT, message=problem))
