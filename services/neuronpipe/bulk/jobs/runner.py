"""Runs a job: reads its inputs, sends them to the gateway with bulk priority, writes what came of them.

An asynchronous invocation of a SageMaker client is sent as the body of a request to /endpoints/NAME/invocations, and
what comes back is written as an object.
"""

import asyncio
import codecs
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import grpc
from google.protobuf import json_format

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, Priority
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.jobs_pb2 import JobResult, SubmitInferenceRequest
from neuronpipe.bulk.jobs.job import Invocation, Job, Progress
from neuronpipe.bulk.jobs.post import Answer, Destination, PostFailed, post, resolve
from neuronpipe.core.background import Places
from neuronpipe.core.errors import (
    Cancelled,
    InvalidInput,
    NeuronpipeError,
    NotConfigured,
    Overloaded,
    SetupError,
    Unauthenticated,
    Unavailable,
)
from neuronpipe.core.logs import log_warning
from neuronpipe.core.names import ON_BEHALF, TRACEPARENT
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.storage import ObjectUri, Storage, StorageError
from neuronpipe.platform.tls import TlsFiles
from neuronpipe.rpc.client import Connection, error_of, key_metadata

ResultT = TypeVar("ResultT")

# An answer over HTTP may come so long after the limit of the work.
_ANSWER_S = 5.0
# Between attempts while the gateway cannot be reached: doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0


class Gateway:
    """Calls a gateway as fast as it admits bulk work: where it refuses a tenant's call, or cannot answer it, no other
    one of that tenant is sent for as long as it says.
    """

    def __init__(self, target: str, tls: TlsFiles | None, max_in_flight: int) -> None:
        """Raises SetupError for TLS files that cannot be used."""
        self._connection = Connection(target, InferenceServiceStub, None, tls)
        self._key = key_metadata(target=target, is_encrypted=tls is not None)
        self._places = Places(max_in_flight)
        self._closed_until_s: dict[str, float] = {}

    def closed_s(self) -> dict[str, float]:
        """The tenants of which it admits no more work, and for how many seconds."""
        now_s = time.monotonic()
        self._closed_until_s = {tenant: until_s for tenant, until_s in self._closed_until_s.items() if until_s > now_s}
        return {tenant: until_s - now_s for tenant, until_s in self._closed_until_s.items()}

    async def outcome(
        self, request: InferRequest, tenant: str, trace: SpanContext | None, limit_s: float, sent: Callable[[], None]
    ) -> InferOutcome:
        """What comes of a request. It is sent until the gateway has worked on it, which may take `limit_s` seconds.
        Calls `sent` each time.
        """
        request.priority = Priority.PRIORITY_BULK
        metadata = self.metadata(tenant, trace)
        try:
            return await self.admitted(lambda: self._infer(request, metadata, limit_s), tenant, sent)
        except NeuronpipeError as error:
            return InferOutcome(error=to_status(error))

    def metadata(self, tenant: str, trace: SpanContext | None) -> list[tuple[str, str]]:
        """What a call for a tenant shows the gateway."""
        metadata = [*self._key, *([(ON_BEHALF, tenant)] if tenant else [])]
        return [*metadata, (TRACEPARENT, trace.traceparent)] if trace else metadata

    async def admitted(self, call: Callable[[], Awaitable[ResultT]], tenant: str, sent: Callable[[], None]) -> ResultT:
        """What a call returns, which is made until the gateway admits it. Raises the call's other errors."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if closed_s := self._closed_until_s.get(tenant, 0.0) - time.monotonic():
                await asyncio.sleep(max(0.0, closed_s))
            async with self._places.taken(tenant):
                if self._closed_until_s.get(tenant, 0.0) > time.monotonic():
                    continue  # another call of the tenant was refused meanwhile
                sent()
                try:
                    return await call()
                except Overloaded as error:
                    self._close(tenant, error.retry_after_s)
                except (Unavailable, Cancelled, Unauthenticated) as error:
                    if isinstance(error, Unauthenticated):
                        log_warning("the gateway does not let this worker call for the tenant of a job", tenant=tenant)
                    self._close(tenant, pause_s)
                    pause_s = min(_LAST_PAUSE_S, 2 * pause_s)

    async def close(self) -> None:
        """Ends all calls."""
        await self._connection.close()

    def _close(self, tenant: str, seconds: float) -> None:
        until_s = time.monotonic() + seconds * random.uniform(1.0, 1.2)  # noqa: S311
        self._closed_until_s[tenant] = max(self._closed_until_s.get(tenant, 0.0), until_s)

    async def _infer(self, request: InferRequest, metadata: Sequence[tuple[str, str]], limit_s: float) -> InferOutcome:
        ends_s = time.monotonic() + limit_s
        with self._connection.use() as stub:
            try:
                return InferOutcome(response=await stub.Infer(request, timeout=limit_s, metadata=metadata))
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, ends_s - time.monotonic()) from failure


class Invoker:
    """Calls the gateway over HTTP. `max_bytes`: of an object, and of an answer."""

    def __init__(self, target: str, gateway: Gateway, storage: Storage, max_bytes: int) -> None:
        """`target`: http://HOST:PORT; empty for none. Raises SetupError for another one."""
        try:
            self._to = Destination.of(target) if target else None
        except ValueError as error:
            raise SetupError(f"--http-target: {error}") from error
        self._gateway = gateway
        self._storage = storage
        self._max_bytes = max_bytes

    async def run(self, job: Job, progress: Progress, trace: SpanContext | None) -> JobResult:
        """What comes of an invocation. Raises NeuronpipeError where its objects cannot be read or written."""
        invocation = Invocation(**json.loads(job.invocation))
        body = await self._read(invocation.input_uri)
        send = partial(self._send, invocation, job, body, trace)
        answer = await self._gateway.admitted(send, job.tenant, progress.begin)
        has_failed = answer.status >= 300
        uri = invocation.failure_uri if has_failed else invocation.output_uri
        await self._write(uri, answer.body)
        return JobResult(output_uri=uri, succeeded=not has_failed, failed=has_failed)

    async def _send(self, invocation: Invocation, job: Job, body: bytes, trace: SpanContext | None) -> Answer:
        if not self._to:
            raise NotConfigured("the worker that had this job knows no HTTP address of the gateway: set http_target")
        to = Destination(self._to.scheme, self._to.host, self._to.port, f"/endpoints/{invocation.endpoint}/invocations")
        headers = dict(self._gateway.metadata(job.tenant, trace)) | {
            "content-type": invocation.content_type,
            "accept": invocation.accept,
            "neuronpipe-priority": "bulk",
            "x-request-id": job.id,
            "x-request-timeout-ms": str(job.limit_s * 1000),
        }
        try:
            # The gateway says first that the time is over.
            limits = job.limit_s + _ANSWER_S, self._max_bytes
            answer = await post(to, await resolve(to, None), headers, body, limits)
        except PostFailed as error:
            if error.status:
                return Answer(error.status, {}, json.dumps({"error": str(error)}).encode())
            raise Unavailable(f"the gateway does not answer over HTTP: {error}") from error
        if answer.status == 429:
            raise Overloaded("the gateway is overloaded", int(answer.headers.get("retry-after-ms", "1000")) / 1000)
        if answer.status == 401:
            raise Unauthenticated("the gateway does not let this worker call")
        if answer.status == 503:
            raise Unavailable("the gateway cannot answer now")
        return answer

    async def _read(self, uri: str) -> bytes:
        try:
            return await asyncio.to_thread(self._storage.read, ObjectUri.parse(uri), self._max_bytes)
        except StorageError as error:
            raise object_failed("input_uri", uri, error) from error

    async def _write(self, uri: str, data: bytes) -> None:
        try:
            await asyncio.to_thread(self._storage.write, ObjectUri.parse(uri), data)
        except StorageError as error:
            raise object_failed("output_uri", uri, error) from error


def object_failed(field: str, uri: str, error: StorageError) -> NeuronpipeError:
    """The error of a job whose object cannot be used; an Unavailable may be tried again."""
    return InvalidInput(field, f"{uri} {error}") if error.is_lasting else Unavailable(f"{field}: {uri} {error}")


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
        lines = data.removeprefix(codecs.BOM_UTF8).splitlines()
        return [_read_line(number, line) for number, line in enumerate(lines, 1) if line.strip()]

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
