"""Runs the asynchronous invocation of a SageMaker client: sends it as the body of a request to
/endpoints/NAME/invocations, and writes the answer as an object.
"""

import json
from functools import partial
from http import HTTPStatus

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.job import Invocation, JobProgress, StoredJob
from neuronpipe.bulk.jobs.objects import object_failed, write_object
from neuronpipe.bulk.jobs.post import Destination, HttpAnswer, PostFailed, post, resolve
from neuronpipe.core.errors import NotConfigured, Overloaded, SetupError, Unauthenticated, Unavailable
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.storage import ObjectUri, Storage, StorageError

# The longest time between the limit of the work and an answer over HTTP.
_ANSWER_S = 5.0


class Invoker:
    """Calls the gateway over HTTP. `max_bytes`: the limit of an object, and of an answer."""

    def __init__(self, target: str, gateway: BulkGateway, storage: Storage, max_bytes: int) -> None:
        """`target`: http://HOST:PORT; empty for none. Raises SetupError if the target has another form."""
        try:
            self._destination = Destination.of(target) if target else None
        except ValueError as error:
            raise SetupError(f"--http-target: {error}") from error
        self._gateway = gateway
        self._storage = storage
        self._max_bytes = max_bytes

    async def run(self, job: StoredJob, progress: JobProgress, trace: SpanContext | None) -> JobResult:
        """Returns the result of an invocation. Raises NeuronpipeError if its objects cannot be read or written."""
        invocation = Invocation(**json.loads(job.invocation))
        body = await self._read(invocation.input_uri)
        send = partial(self._send, invocation, job, body, trace)
        answer = await self._gateway.admitted(send, job.tenant, progress.begin)
        has_failed = answer.status >= HTTPStatus.MULTIPLE_CHOICES
        uri = invocation.failure_uri if has_failed else invocation.output_uri
        await write_object(self._storage, uri, answer.body, progress)
        return JobResult(output_uri=uri, succeeded=not has_failed, failed=has_failed)

    async def _send(self, invocation: Invocation, job: StoredJob, body: bytes, trace: SpanContext | None) -> HttpAnswer:
        if not self._destination:
            raise NotConfigured("the worker that had this job knows no HTTP address of the gateway: set http_target")
        destination = Destination(
            self._destination.scheme,
            self._destination.host,
            self._destination.port,
            f"/endpoints/{invocation.endpoint}/invocations",
        )
        headers = dict(self._gateway.metadata(job.tenant, trace)) | {
            "content-type": invocation.content_type,
            "accept": invocation.accept,
            "neuronpipe-priority": "bulk",
            "x-request-id": job.id,
            "x-request-timeout-ms": str(job.limit_s * 1000),
        }
        try:
            # Longer than the limit, so that the gateway reports first that the time is over.
            limits = job.limit_s + _ANSWER_S, self._max_bytes
            answer = await post(destination, await resolve(destination, None), headers, body, limits)
        except PostFailed as error:
            if error.status:
                return HttpAnswer(error.status, {}, json.dumps({"error": str(error)}).encode())
            raise Unavailable(f"the gateway does not answer over HTTP: {error}") from error
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise Overloaded("the gateway is overloaded", int(answer.headers.get("retry-after-ms", "1000")) / 1000)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise Unauthenticated("the gateway does not let this worker call")
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise Unavailable("the gateway cannot answer now")
        return answer

    async def _read(self, uri: str) -> bytes:
        try:
            return await run_apart(self._storage.read, ObjectUri.parse(uri), self._max_bytes)
        except StorageError as error:
            raise object_failed("input_uri", uri, error) from error
