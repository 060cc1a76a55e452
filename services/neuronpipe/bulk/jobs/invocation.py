"""Runs the asynchronous invocation of a SageMaker client: sends it as the body of a request to
/endpoints/NAME/invocations, and writes the answer as an object.
"""

import json
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from urllib.parse import quote

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.job import Invocation, JobProgress, StoredJob
from neuronpipe.bulk.jobs.objects import JobObjects
from neuronpipe.bulk.jobs.post import Destination, HttpAnswer, PostFailed, post, resolve
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.errors import NotConfigured, Overloaded, SetupError, Unauthenticated, Unavailable
from neuronpipe.core.tracing import SpanContext

# The longest time between the limit of the work and an answer over HTTP.
_ANSWER_S = 5.0


class Invoker:
    """Calls the gateway over HTTP."""

    def __init__(self, gateway: BulkGateway, objects: JobObjects, settings: WorkerSettings) -> None:
        """Raises SetupError for a setting `http_target` that is no address."""
        try:
            self._destination = Destination.of(settings.http_target) if settings.http_target else None
        except ValueError as error:
            raise SetupError(f"--http-target: {error}") from error
        self._gateway, self._objects, self._max_bytes = gateway, objects, settings.max_input_bytes

    async def run(self, job: StoredJob, progress: JobProgress, trace: SpanContext | None) -> JobResult:
        """Returns the result of an invocation. Raises NeuronpipeError if its objects cannot be read or written."""
        invocation = Invocation(**json.loads(job.invocation))
        body = await self._objects.read(invocation.input_uri)
        send = partial(self._send, invocation, job, body, trace)
        answer = await self._gateway.admitted(send, job.tenant, progress.begin)
        has_failed = answer.status >= HTTPStatus.MULTIPLE_CHOICES
        uri = invocation.failure_uri if has_failed else invocation.output_uri
        await self._objects.write(uri, answer.body, progress)
        return JobResult(output_uri=uri, succeeded=int(not has_failed), failed=int(has_failed))

    async def _send(self, invocation: Invocation, job: StoredJob, body: bytes, trace: SpanContext | None) -> HttpAnswer:
        if not self._destination:
            raise NotConfigured(
                "the worker that had this job knows no HTTP address of the gateway: "
                "start the workers with --http-target"
            )
        destination = replace(self._destination, path=f"/endpoints/{quote(invocation.endpoint)}/invocations")
        headers = dict(self._gateway.metadata(job.tenant, trace)) | {
            "content-type": invocation.content_type,
            "accept": invocation.accept,
            "neuronpipe-priority": "bulk",
            "x-request-id": job.id,
            "x-request-timeout-ms": str(job.limit_s * 1000),
        }
        try:
            address = await resolve(destination, None)
            # Longer than the limit, so that the gateway reports first that the time is over.
            timeout_s = job.limit_s + _ANSWER_S
            answer = await post(destination, address, headers, body, timeout_s=timeout_s, max_bytes=self._max_bytes)
        except PostFailed as error:
            if error.status:
                return HttpAnswer(error.status, {}, json.dumps({"error": str(error)}).encode())
            raise Unavailable(f"the gateway does not answer over HTTP: {error}") from error
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise Overloaded("the gateway is overloaded", int(answer.headers.get("retry-after-ms", "1000")) / 1000)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            raise Unauthenticated("the gateway does not let this worker call")
        # A proxy in front answers 502 while it reaches no gateway; a gateway never does.
        if answer.status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE):
            raise Unavailable("the gateway cannot answer now")
        return answer
