"""A worker takes jobs from the store, and runs several at once, as the gateway admits them."""

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.job import EndState, JobProgress, TakenJob, end_of, expired
from neuronpipe.bulk.jobs.runner import Runner
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore, worker_name
from neuronpipe.core.calls import Call, to_caller_error
from neuronpipe.core.errors import NeuronpipeError, NotAllowed, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Attributes, Metrics, Spans
from neuronpipe.core.tracing import Link, Span, SpanContext, enter_span
from neuronpipe.platform.process.background import run_beside, wait_for_event

# The interval of looking for jobs of workers that have died, and for new jobs that no message has announced.
_LOOK_EVERY_S = 1.0
_LOOK_FOR_EXPIRED_EVERY_S = 5.0
_EXPIRED_AT_ONCE = 1000
# Looks per lease, at least: Redis counts workers as running while it hears of any (lua/common.lua).
_LOOKS = 4
# A worker holds at most this number of times its jobs at once, if tenants may run no more of theirs.
_MOST_HELD = 4
# The pause before the next attempt while Redis does not answer.
_PAUSE_S = 0.5
# The longest time for which a stopping worker waits for Redis.
_GIVE_BACK_LIMIT_S = 3.0
# Renewals in the time of a lease.
_RENEWALS = 3
# Attempts to read an object that may become readable.
_OBJECT_ATTEMPTS, _OBJECT_PAUSE_S = 4, 1.0


@dataclass(slots=True, eq=False)
class _Running:
    """A job that this worker has. `is_lost`: it has ended elsewhere, or another worker has it. `is_done`: only its end
    is left to be stored, which counts even if another worker has the job by now.
    """

    taken: TakenJob
    progress: JobProgress = field(default_factory=JobProgress)
    task: "asyncio.Task[None] | None" = None
    is_lost: bool = False
    is_done: bool = False


class JobWorker:
    """Holds jobs under a lease, which it renews, until they have ended or it gives them back."""

    def __init__(
        self,
        store: JobStore,
        gateway: BulkGateway,
        runner: Runner,
        settings: WorkerSettings,
        telemetry: Telemetry,
        secret: bytes = b"",
    ) -> None:
        """`secret`: the secret with which gateways sign jobs; empty to run all jobs."""
        self.name = worker_name()
        self._store, self._gateway, self._runner, self._telemetry = store, gateway, runner, telemetry
        self._max_jobs, self._lease_s, self._max_attempts = settings.max_jobs, settings.lease_s, settings.max_attempts
        self._secret = secret
        self._look_s = min(_LOOK_EVERY_S, self._lease_s / _LOOKS)
        self._running: set[_Running] = set()
        self._woken = asyncio.Event()
        self._is_draining = False

    async def run(self) -> None:
        """Takes and runs jobs until it is cancelled. Then it gives back the jobs that it still has."""
        try:
            listening = self._store.listen("queued", lambda _: self._woken.set())
            async with run_beside(self._renew_leases(), listening, self._end_expired()):
                await self._take_jobs()
        finally:
            await self._cancel_all()

    async def drain(self) -> None:
        """Takes no more jobs, gives back jobs that it has not begun, and waits for the others."""
        self._is_draining = True
        self._woken.set()
        for running in self._running:
            if running.task and not running.progress.has_begun:
                running.task.cancel()
        while tasks := [running.task for running in self._running if running.task]:
            await asyncio.wait(tasks)

    async def _take_jobs(self) -> None:
        while True:
            self._woken.clear()
            closed_s = self._gateway.closed_s()
            tenants = Counter(running.taken.job.tenant for running in self._running)
            # Jobs that wait for their tenant's quota, or for their object's storage, leave room for others.
            busy = sum(
                not (running.progress.is_stalled or running.taken.job.tenant in closed_s) for running in self._running
            )
            free = min(self._max_jobs - busy, _MOST_HELD * self._max_jobs - len(self._running))
            taken: list[TakenJob] = []
            began_s = time.monotonic()
            if free > 0 and not self._is_draining:
                full = [name for name, count in tenants.items() if name and count >= self._max_jobs]
                has = [running.taken.job.id for running in self._running]
                try:
                    taken = await self._store.take_jobs(self.name, self._lease_s, free, {*full, *closed_s}, has)
                except NeuronpipeError as error:
                    log_warning("no jobs can be taken", problem=error.message)
                    await asyncio.sleep(_PAUSE_S)
            for job in taken:
                running = _Running(job, JobProgress(lease_ends_s=began_s + self._lease_s))
                self._running.add(running)
                running.task = asyncio.create_task(self._hold(running))
            if len(taken) < free or free <= 0:
                opens_s = max(_PAUSE_S, min(closed_s.values(), default=_LOOK_EVERY_S))
                await wait_for_event(self._woken, min(self._look_s, opens_s))

    async def _hold(self, running: _Running) -> None:
        """Runs a job to its end, or gives it back."""
        job = running.taken.job
        try:
            if self._is_draining:
                raise asyncio.CancelledError
            state, end = await self._attempt(running)
            running.is_done = True
            await self._store_end(job.id, state, end)
        except asyncio.CancelledError:
            if not running.is_lost:
                await self._give_back(running.taken)
        finally:
            self._running.discard(running)
            self._woken.set()

    async def _attempt(self, running: _Running) -> tuple[EndState, bytes]:
        taken, job = running.taken, running.taken.job
        if self._secret and not job.is_signed(self._secret):
            log_warning("a job is not run: no gateway with this --jobs-secret has signed it", job=job.id)
            return "failed", end_of(NotAllowed("the job was not signed by a gateway of this deployment"))
        if job.attempts > self._max_attempts:
            problem = f"{job.attempts - 1} workers died or hung while they had this job, the limit; it is set aside"
            log_warning("a job is set aside", job=job.id, workers=job.attempts - 1)
            return "dead", end_of(Unavailable(problem))
        if job.attempts > 1:
            self._telemetry.meters.counter(Metrics.JOBS_RETRIED).add()
        elif job.started_ms:
            waits = self._telemetry.meters.histogram(Metrics.JOB_WAIT, job.priority)
            waits.record((job.started_ms - job.created_ms) * 1e6)
        span, began_ns = self._begin_span(running), time.monotonic_ns()
        error: NeuronpipeError | None = None
        timer = asyncio.timeout(max(0.0, taken.left_s))
        try:
            async with timer:
                return "succeeded", end_of(await self._run(running, span.context if span else None))
        except Exception as fault:
            is_expired = isinstance(fault, TimeoutError) and timer.expired()
            error = expired() if is_expired else to_caller_error(fault, Call(job.id))
            return "expired" if is_expired else "failed", end_of(error)
        finally:
            ended_ns = time.monotonic_ns()
            self._telemetry.meters.histogram(Metrics.JOB_DURATION).record(ended_ns - began_ns)
            if span:
                if error:
                    span.fail(error, ended_ns)
                span.ended_ns = ended_ns
                self._telemetry.tracer.record(span)

    async def _run(self, running: _Running, trace: SpanContext | None) -> JobResult:
        """Returns the job's result. An object that cannot be read now is read again later."""
        for attempt in range(1, _OBJECT_ATTEMPTS):
            with suppress(Unavailable):
                return await self._runner.run(running.taken.job, running.progress, trace)
            running.progress.completed = 0
            await asyncio.sleep(_OBJECT_PAUSE_S * attempt)
        return await self._runner.run(running.taken.job, running.progress, trace)

    def _begin_span(self, running: _Running) -> Span | None:
        """Begins the span of an attempt. It is sampled if the submitter's span was, otherwise by this process's own
        choice.
        """
        job, tracer = running.taken.job, self._telemetry.tracer
        submitter = job.span
        context = tracer.joined(submitter and SpanContext.new(is_sampled=submitter.is_sampled)) or tracer.begin(None)
        if not context:
            return None
        span = Span(Spans.JOB, context, None, time.monotonic_ns())
        span.attributes |= {Attributes.JOB_ID: job.id, Attributes.JOB_PRIORITY: job.priority}
        span.attributes[Attributes.INPUTS] = job.inputs
        if submitter:
            span.links.append(Link(submitter))
        enter_span(span)
        return span

    async def _store_end(self, id: str, state: EndState, end: bytes) -> None:
        """Stores the end of a job, and tries until it is stored. If the worker dies before, the job runs again."""
        while True:
            try:
                if ended := await self._store.end_job(id, state, end):
                    self._telemetry.meters.counter(Metrics.JOBS_ENDED, ended).add()
                return
            except NeuronpipeError as error:
                log_warning("the end of a job cannot be stored yet", job=id, problem=error.message)
                await asyncio.sleep(_PAUSE_S)

    async def _give_back(self, taken: TakenJob) -> None:
        try:
            async with asyncio.timeout(_GIVE_BACK_LIMIT_S):
                await self._store.give_back(self.name, taken)
        except (NeuronpipeError, TimeoutError) as error:  # the lease ends soon
            log_warning("a job cannot be given back", job=taken.job.id, problem=str(error) or "no answer in time")

    async def _renew_leases(self) -> None:
        """Renews leases, and stops jobs that have ended elsewhere."""
        pause_s = self._lease_s / _RENEWALS
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self._lease_s / _RENEWALS
            began_s = time.monotonic()
            held_jobs = [running for running in self._running if running.task]
            if not held_jobs:
                continue
            try:
                kept: list[bool] = await self._store.renew_leases(
                    self.name, [(running.taken, running.progress.completed) for running in held_jobs]
                )
            except NeuronpipeError as error:
                log_warning("leases cannot be renewed", problem=error.message)
                pause_s = min(pause_s, _PAUSE_S)
                continue
            for running, is_mine in zip(held_jobs, kept, strict=True):
                if is_mine:
                    running.progress.renew(began_s + self._lease_s)
                elif running in self._running and running.task and not running.is_done:
                    running.is_lost = True
                    running.task.cancel()

    async def _end_expired(self) -> None:
        """Ends jobs whose time is over before a worker took them."""
        while True:
            await asyncio.sleep(_LOOK_FOR_EXPIRED_EVERY_S)
            with suppress(NeuronpipeError):
                late = await self._store.end_expired(_EXPIRED_AT_ONCE, end_of(expired()))
                self._telemetry.meters.counter(Metrics.JOBS_ENDED, "expired").add(late)

    async def _cancel_all(self) -> None:
        tasks = [running.task for running in self._running if running.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
