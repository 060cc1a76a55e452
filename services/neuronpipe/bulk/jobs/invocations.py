"""Runs asynchronous invocations of SageMaker's clients: an object is sent to the gateway as the body of a request to
/endpoints/NAME/invocations, and what comes back is written as an object.
"""

import asyncio
import json
from functools import partial

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs.gateway import Gateway
from neuronpipe.bulk.jobs.job import Invocation, Job, Progress
from neuronpipe.bulk.jobs.post import Answer, Destination, PostFailed, post, resolve
from neuronpipe.core.errors import (
    InvalidInput,
    NeuronpipeError,
    NotConfigured,
    Overloaded,
    SetupError,
    Unauthenticated,
    Unavailable,
)
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.storage.objects import Storage, StorageError
from neuronpipe.platform.storage.uris import ObjectUri


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
            answer = await post(to, await resolve(to, None), headers, body, (job.limit_s, self._max_bytes))
        except PostFailed as error:
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
