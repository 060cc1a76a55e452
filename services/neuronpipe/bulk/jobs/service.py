"""The operations of callers on jobs, behind every protocol of the gateway. A tenant sees only its own jobs."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from google.longrunning.operations_pb2 import ListOperationsResponse, Operation

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.jobs_pb2 import JobPriority, SubmitInferenceRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.jobs.job import (
    DAMAGED_EVENT,
    PRIORITIES,
    SIGNED_FIELDS,
    Invocation,
    ListPlace,
    NewJob,
    StoredJob,
    cancelled,
    end_of,
    expired,
    id_of,
    job_signature,
    new_id,
)
from neuronpipe.bulk.jobs.post import check_host
from neuronpipe.bulk.jobs.settings import MAX_TTL_S, MAX_WORK_S, JobSettings, read_secret
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import AlreadyExists, InvalidInput, JobNotFound, NotConfigured, Overloaded
from neuronpipe.core.logs import SeldomWarnings
from neuronpipe.core.packed import Packed
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.request_checks import check_fields, check_input
from neuronpipe.gateway.requests import InferenceRequest
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.tenants.tenants import FairLimit, Tenants
from neuronpipe.platform.process.background import run_beside, wait_for_event
from neuronpipe.platform.storage import parse_below

if TYPE_CHECKING:
    from neuronpipe.bulk.jobs.store import JobStore

_MAX_REQUEST_ID, _MAX_URL = 256, 2048
# Waiting and running jobs of all callers.
_MAX_OPEN = 100_000
# Inputs of a job that is not from a URI, and the largest job in Redis.
_MAX_INPUTS, _MAX_PAYLOAD_BYTES = 1000, 1 << 20
# Time that a job gets to end, and deadline of one of its inputs, where its caller gives none.
_TTL_S, _WORK_LIMIT_S = 21_600, 900
_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
# The interval of looking for a job's end if no message announces it.
_LOOK_EVERY_S = 5.0
_PAUSE_S = 1.0
# The longest wait, after which a caller asks again; and the maximum number of waits at once.
_MAX_WAIT_S, _MAX_WAITS = 600.0, 2048


class _Watch:
    """A job that callers wait for: one task looks for all of them."""

    def __init__(self, job: StoredJob) -> None:
        self.job = job
        self.waiters = 0
        self.ended = asyncio.Event()
        self.looking: asyncio.Task[None] | None = None


class Jobs:
    """The jobs of a gateway. `tenants`: their quotas; None if callers are anonymous. `set_aside`: takes a waiting call
    out of the calls in flight, because waits have their own limit.
    """

    def __init__(
        self,
        store: "JobStore | None",
        settings: JobSettings,
        pipeline: PipelineSettings,
        catalog: Catalog,
        tenants: Tenants | None,
        set_aside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Raises SetupError if a secret cannot be used."""
        self._given_store = store
        self._settings = settings
        self._pipeline = pipeline
        self._catalog = catalog
        self._tenants = tenants
        self._set_aside = set_aside
        self._secret = read_secret("--jobs-secret", settings.jobs_secret) if settings.jobs_secret else b""
        self._is_draining = False
        self._watches: dict[str, _Watch] = {}
        self._waits = FairLimit(_MAX_WAITS)
        self._warnings = SeldomWarnings()

    async def submit(self, submitted: SubmitInferenceRequest, call: Call) -> Operation:
        """Stores a job. Raises NeuronpipeError as jobs.proto says."""
        self._check_limits(submitted)
        self._check_content(submitted, call.caller.tenant, call)
        content = submitted.SerializeToString(deterministic=True)
        if len(content) > _MAX_PAYLOAD_BYTES:
            problem = f"{len(content)} bytes, the limit is {_MAX_PAYLOAD_BYTES}; submit larger jobs as an input_uri"
            raise InvalidInput("requests", problem)
        inputs = len(submitted.requests)
        fields: dict[str, str | int] = {"inputs": inputs, "notify": submitted.notification_url}
        # The number of outcomes for which a worker reserves room in Redis.
        fields["outcomes"] = 0 if submitted.output_uri else inputs or _MAX_INPUTS
        return await self._submit(submitted, content, fields, call)

    async def invoke(self, invocation: Invocation, timing: SubmitInferenceRequest, call: Call) -> Invocation:
        """Stores a job of SageMaker's clients, and returns it with the objects to which its output goes.

        `timing`: its id and its limits. Raises NeuronpipeError.
        """
        folder = self._settings.sagemaker_folder(call.caller.tenant)
        if not folder:
            raise NotConfigured("this gateway has no folder for asynchronous invocations: set --jobs-sagemaker-output")
        self._check_limits(timing)
        self._check_uri("X-Amzn-SageMaker-InputLocation", invocation.input_uri, call.caller.tenant)
        self._catalog.spec(invocation.endpoint)
        key = _key(call.caller.tenant, timing.request_id)
        invocation = replace(invocation, output_uri=f"{folder}{key}.out", failure_uri=f"{folder}{key}-error.out")
        written = json.dumps(asdict(invocation))
        await self._submit(timing, written.encode(), {"inputs": 1, "invocation": written}, call)
        return invocation

    async def _submit(
        self, submitted: SubmitInferenceRequest, content: bytes, about: Mapping[str, str | int], call: Call
    ) -> Operation:
        """Stores a job, or finds the stored job with the same id and content."""
        tenant, id, digest = call.caller.tenant, new_id(), hashlib.sha256(content).hexdigest()
        priority = PRIORITIES[submitted.priority]
        if priority == "high" and self._tenants and not self._tenants.rights_of(tenant).is_interactive:
            priority = "normal"
        fields: dict[str, str | int] = {
            "request_id": submitted.request_id,
            "trace": call.trace.traceparent if call.trace else "",
            "notify": "",
            "limit": submitted.work_limit_s or _WORK_LIMIT_S,
            **about,
        }
        if self._secret:
            signed_fields = [id, tenant, priority, digest, *(str(fields[name]) for name in SIGNED_FIELDS)]
            fields["signature"] = job_signature(self._secret, signed_fields)
        new = NewJob(
            id=id,
            key=_key(tenant, submitted.request_id or id),
            digest=digest,
            tenant=tenant,
            priority=priority,
            request=content,
            ttl_s=submitted.time_to_live_s or _TTL_S,
            retention_s=self._settings.jobs_retention_s,
            fields=fields,
        )
        tenant_limits = (
            (self._tenants.rights_of(tenant).max_jobs or 0, self._settings.jobs_max_tenant_bytes)
            if self._tenants
            else (0, 0)
        )
        stored_id, known_digest = await self._store.submit(new, _MAX_OPEN, *tenant_limits)
        if known_digest != digest:
            raise AlreadyExists("request_id: another job has it, with other content")
        return self._operation_of(await self._find(stored_id, tenant))

    async def get(self, name: str, call: Call) -> Operation:
        """Returns a job. Raises JobNotFound."""
        return self._operation_of(await self._find(id_of(name), call.caller.tenant))

    async def list_jobs(self, page_size: int, page_token: str, call: Call) -> ListOperationsResponse:
        """Lists the caller's jobs, the newest first. Large results make a page shorter."""
        count = min(page_size if page_size > 0 else _DEFAULT_PAGE, _MAX_PAGE)
        before = ListPlace.parse(page_token) if page_token else None
        if page_token and not before:
            raise InvalidInput("page_token", "is none that an answer had")
        listed, last = await self._store.jobs_of(call.caller.tenant, before, count)
        response = ListOperationsResponse(operations=map(self._operation_of, listed))
        if last:
            response.next_page_token = last.token
        return response

    async def wait(self, name: str, timeout_s: float | None, call: Call) -> Operation:
        """Returns a job when it has ended, or its current state when the time is over.

        `timeout_s`: None: until the call's deadline, at most the longest wait. Raises Overloaded if the tenant waits
        for as many jobs as it may.
        """
        id, tenant = id_of(name), call.caller.tenant
        limits = [limit for limit in (timeout_s, call.remaining_s) if limit is not None]
        # Checked first: otherwise refused calls would also wait for Redis.
        if not self._waits.has_room(tenant):
            raise Overloaded(f"{self._waits.total} calls wait for jobs, the limit", _PAUSE_S)
        self._waits.take(tenant)
        try:
            # For a job that others wait for already, thousands of callers do not each ask Redis.
            watch = self._watches.get(id)
            job = watch.job if watch and watch.job.tenant == tenant else await self._find(id, tenant)
            if job.end:
                return self._operation_of(job)
            with self._set_aside():
                return await self._wait(job, min([*limits, _MAX_WAIT_S]))
        finally:
            self._waits.give_back(tenant)

    async def _wait(self, job: StoredJob, seconds: float) -> Operation:
        id = job.id
        watch = self._watches.get(id) or self._watches.setdefault(id, _Watch(job))
        watch.waiters += 1
        watch.looking = watch.looking or asyncio.create_task(self._look(watch))
        try:
            await asyncio.wait([watch.looking], timeout=max(0.0, seconds))
            if watch.looking.done():
                watch.looking.result()
            return self._operation_of(watch.job)
        finally:
            watch.waiters -= 1
            if not watch.waiters:
                watch.looking.cancel()
                self._watches.pop(id)

    async def cancel(self, name: str, call: Call) -> None:
        """Ends a job that has not ended. Its work stops within seconds. Raises JobNotFound."""
        job = await self._find(id_of(name), call.caller.tenant)
        await self._store.end_job(job.id, "cancelled", end_of(cancelled()))

    async def delete(self, name: str, call: Call) -> None:
        """Deletes a job and its result; cancels it first if it has not ended. Raises JobNotFound."""
        await self.cancel(name, call)
        await self._store.delete(id_of(name))

    async def drain(self) -> None:
        """Answers the callers who wait."""
        self._is_draining = True
        for watch in self._watches.values():
            watch.ended.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Announces ends to waiting callers during the block. Raises SetupError if Redis would lose jobs."""
        store = self._given_store
        if store is None:
            yield
            return
        try:
            await store.check_if_reached()
            async with run_beside(store.listen("ended", self._note_end)):
                yield
        finally:
            await store.close()

    @property
    def _store(self) -> "JobStore":
        if self._given_store is None:
            raise NotConfigured("this gateway takes no jobs: set --jobs-redis-url (see docs/jobs.md)")
        return self._given_store

    async def _find(self, id: str, tenant: str) -> StoredJob:
        """Finds a job of a tenant, and ends it if its time is over. Raises JobNotFound."""
        store = self._store
        job = await store.get(id) if id else None
        if job is None or job.tenant != tenant:
            raise JobNotFound("there is no such job, or no longer")
        if not job.end and await store.is_over(job):
            await store.end_job(id, "expired", end_of(expired()))
            job = await store.get(id) or job
        return job

    def _operation_of(self, job: StoredJob) -> Operation:
        """Returns a job as an operation; a damaged job as failed, beside which others are listed."""
        try:
            return job.operation()
        except ValueError:
            self._warnings.log(DAMAGED_EVENT, job=job.id)
            return StoredJob.damaged(job.id, job.tenant).operation()

    async def _look(self, watch: _Watch) -> None:
        """Returns when a job has ended, or when the gateway drains: callers then ask another gateway. Raises
        JobNotFound, and Unavailable if Redis does not answer.
        """
        while True:
            watch.ended.clear()
            # Also at first: the job may have ended before the watch began.
            watch.job = await self._find(watch.job.id, watch.job.tenant)
            if watch.job.end or self._is_draining:
                return
            await wait_for_event(watch.ended, _LOOK_EVERY_S)

    def _note_end(self, id: str) -> None:
        if watch := self._watches.get(id):
            watch.ended.set()

    def _check_limits(self, submitted: SubmitInferenceRequest) -> None:
        if len(submitted.request_id) > _MAX_REQUEST_ID:
            raise InvalidInput("request_id", f"{len(submitted.request_id)} characters, the limit is {_MAX_REQUEST_ID}")
        if submitted.priority not in PRIORITIES:
            raise InvalidInput("priority", f"{submitted.priority} is none of {', '.join(JobPriority.keys())}")
        for field, limit in (("time_to_live_s", MAX_TTL_S), ("work_limit_s", MAX_WORK_S)):
            if getattr(submitted, field) > limit:
                raise InvalidInput(field, f"{getattr(submitted, field)}, the limit is {limit}")

    def _check_content(self, submitted: SubmitInferenceRequest, tenant: str, call: Call) -> None:
        """Raises InvalidInput, ModelNotFound and WrongTask."""
        if bool(submitted.requests) == bool(submitted.input_uri):
            raise InvalidInput("requests", "one of requests and input_uri must be given, and not both")
        count, limit = len(submitted.requests), _MAX_INPUTS
        if count > limit:
            raise InvalidInput("requests", f"{count} inputs, the limit is {limit}; submit more as an input_uri")
        for field in ("input_uri", "output_uri"):
            if uri := getattr(submitted, field):
                self._check_uri(field, uri, tenant)
        if submitted.notification_url:
            if len(submitted.notification_url) > _MAX_URL:
                problem = f"{len(submitted.notification_url)} characters, the limit is {_MAX_URL}"
                raise InvalidInput("notification_url", problem)
            try:
                check_host(submitted.notification_url, self._settings.jobs_notification_hosts)
            except ValueError as error:
                raise InvalidInput("notification_url", str(error)) from error
        for number, request in enumerate(submitted.requests):
            self._check_request(number, request, call)

    def _check_uri(self, field: str, uri: str, tenant: str) -> None:
        folders = self._settings.job_folders(tenant)
        if not folders:
            raise InvalidInput(field, "this gateway has no folders for jobs: set jobs_uris")
        try:
            parse_below(uri, folders)
        except ValueError as error:
            raise InvalidInput(field, str(error)) from error

    def _check_request(self, number: int, request: InferRequest, call: Call) -> None:
        """Raises the error with which the request would certainly fail later."""
        checked = InferenceRequest(
            call.for_request(request.request_id, request.priority),
            request.model,
            request.version,
            Packed(TaskInput, message=request.input),
            request.cache_control,
        )
        try:
            check_fields(checked)
            check_input(checked, self._catalog.spec(request.model, request.version), self._pipeline)
        except InvalidInput as error:
            raise InvalidInput(f"requests[{number}].{error.field}", error.problem, error.mentions) from error


def _key(tenant: str, request_id: str) -> str:
    """Returns a text that is equal for equal jobs."""
    return hashlib.sha256(f"{tenant}\0{request_id}".encode()).hexdigest()
