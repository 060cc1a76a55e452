"""Notifies receivers of ended jobs: a CloudEvent 1.0 by HTTP, signed as Standard Webhooks prescribe.

https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/http-protocol-binding.md, structured content mode;
https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from weakref import WeakValueDictionary

from neuronpipe.bulk.jobs.job import StoredJob
from neuronpipe.bulk.jobs.post import Destination, Network, PostFailed, post, resolve
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.units import words_of
from neuronpipe.platform.process.background import wait_for_event

_SECRET_PREFIX = "whsec_"  # noqa: S105 (what secrets begin with)
_MIN_SECRET_BYTES = 24
_LOOK_EVERY_S = 0.5
# Maximum number of attempts at once: in all, for one tenant, and at one receiver. Further attempts wait for a place,
# then are put off.
_AT_ONCE, _AT_ONCE_OF_TENANT, _AT_ONCE_OF_RECEIVER = 256, 128, 16
_PATIENCE_S, _PUT_OFF_S = 1.0, 10.0
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 10
# The time for which this process holds a notification, longer than an attempt takes.
_HOLD_S = 60.0
# The pauses after the first attempt, the second, …; each up to a quarter longer at random. Nearly two hours in all.
_DELAYS_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0)


class _Receivers(asyncio.Semaphore):
    """The places of a host and port, or of all receivers of a tenant."""

    _is_slow = False

    @asynccontextmanager
    async def place(self) -> AsyncIterator[bool]:
        """Yields whether the block has a place. Waits a short time for it, or not at all after another wait was too
        long.
        """
        has_place = False
        try:
            async with asyncio.timeout(0 if self._is_slow and self.locked() else _PATIENCE_S):
                has_place = await self.acquire()
        except TimeoutError:
            self._is_slow = True
        try:
            yield has_place
        finally:
            if has_place:
                self.release()


class Notifier:
    """Takes ended jobs from the store, and notifies their receivers."""

    def __init__(
        self, store: JobStore, secret: bytes, networks: Sequence[Network], meters: Meters, jobs_secret: bytes = b""
    ) -> None:
        """`networks`: may be reached in addition to public addresses. `jobs_secret`: the secret with which
        gateways sign jobs; empty to notify of all jobs.
        """
        self._jobs_secret = jobs_secret
        self._store = store
        self._secret = secret
        self._networks = networks
        self._meters = meters
        self._receivers: WeakValueDictionary[str, _Receivers] = WeakValueDictionary()
        self._free = _AT_ONCE
        self._has_notified = asyncio.Event()

    @classmethod
    def of(cls, settings: WorkerSettings, store: JobStore, meters: Meters, jobs_secret: bytes) -> Self:
        """Makes the notifier of a worker from its settings. Raises SetupError."""
        try:
            networks = [*map(ipaddress.ip_network, words_of(settings.notification_networks))]
        except ValueError as error:
            raise SetupError(f"--notification-networks: {error}") from error
        return cls(store, read_secret(Path(settings.notification_secret)), networks, meters, jobs_secret)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as telling:
            while True:
                self._has_notified.clear()
                taken: list[StoredJob] = []
                try:
                    taken = await self._store.take_notifications(self._free, _HOLD_S) if self._free else []
                except NeuronpipeError as error:
                    log_warning("receivers cannot be told of jobs", problem=error.message)
                for job in taken:
                    self._free -= 1
                    telling.create_task(self._tell(job))
                await wait_for_event(self._has_notified, _LOOK_EVERY_S)

    async def _tell(self, job: StoredJob) -> None:
        """Makes an attempt, or none while the receiver, or other receivers of its tenant, are slow with other jobs."""
        receiver = ""
        with suppress(ValueError):  # the attempt names the problem
            destination = Destination.of(job.notify)
            receiver = f"{destination.host}:{destination.port}"
        receiver_places = self._receivers.setdefault(receiver, _Receivers(_AT_ONCE_OF_RECEIVER))
        tenant_places = self._receivers.setdefault(f"tenant {job.tenant}", _Receivers(_AT_ONCE_OF_TENANT))
        try:
            async with receiver_places.place() as has_place, tenant_places.place() as may_begin:
                if has_place and may_begin:
                    await self._attempt(job)
                else:
                    delay_s = _PUT_OFF_S * random.uniform(1.0, 2.0)  # noqa: S311
                    await self._store.postpone_notification(job.id, delay_s, is_attempt=False)
        except NeuronpipeError as error:  # the job is taken again after the hold
            log_warning("receivers cannot be told of jobs", problem=error.message)
        finally:
            self._free += 1
            self._has_notified.set()

    async def _attempt(self, job: StoredJob) -> None:
        if self._jobs_secret and not job.is_signed(self._jobs_secret):
            log_warning("no receiver is told of a job that no gateway has signed", job=job.id)
            await self._store.end_notification(job.id)
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._send(job)
        except (PostFailed, ValueError, TimeoutError) as error:
            await self._postpone(job, str(error) or "no answer in time")
            return
        self._count("accepted")
        await self._store.end_notification(job.id)

    async def _send(self, job: StoredJob) -> None:
        body = event_of(job)
        at_s = int(time.time())
        headers = {
            "content-type": "application/cloudevents+json; charset=utf-8",
            "user-agent": "neuronpipe",
            "webhook-id": job.id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": signature(self._secret, job.id, at_s, body),
        }
        destination = Destination.of(job.notify)
        address = await resolve(destination, self._networks)
        answer = await post(destination, address, headers, body, timeout_s=_TIMEOUT_S, max_bytes=_MAX_ANSWER_BYTES)
        if not 200 <= answer.status < 300:  # also redirects, whose targets nothing has allowed
            raise PostFailed(f"it answered {answer.status}")

    async def _postpone(self, job: StoredJob, problem: str) -> None:
        if job.notified > len(_DELAYS_S):
            self._count("given_up")
            log_warning("a receiver is not told of a job any more", job=job.id, attempts=job.notified, problem=problem)
            await self._store.end_notification(job.id)
            return
        self._count("refused")
        delay_s = _DELAYS_S[job.notified - 1] * random.uniform(1.0, 1.25)  # noqa: S311
        await self._store.postpone_notification(job.id, delay_s)

    def _count(self, outcome: str) -> None:
        self._meters.counter(Metrics.NOTIFICATIONS, outcome).add()


def event_of(job: StoredJob) -> bytes:
    """Returns the CloudEvent of an ended job. It has no result: receivers get the result as the job's caller does."""
    event = {
        "specversion": "1.0",
        "id": job.id,
        "source": "/neuronpipe/jobs",
        "type": f"neuronpipe.job.{job.state}",
        "subject": job.name,
        "time": datetime.fromtimestamp(job.ended_ms / 1000, UTC).isoformat(timespec="milliseconds"),
        "datacontenttype": "application/json",
        "data": {"name": job.name, "state": job.state, "request_id": job.request_id, "inputs": job.inputs},
    }
    return json.dumps(event).encode()


def signature(secret: bytes, id: str, at_s: int, body: bytes) -> str:
    """Returns the value of the header `webhook-signature`."""
    digest = hmac.new(secret, f"{id}.{at_s}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def read_secret(file: Path) -> bytes:
    try:
        with reporting_os_errors(f"--notification-secret {file}"):
            text = file.read_text(encoding="ascii").strip()
        secret = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret, text = b"", ""
    if not text.startswith(_SECRET_PREFIX) or len(secret) < _MIN_SECRET_BYTES:
        raise SetupError(
            f"--notification-secret {file}: must be {_SECRET_PREFIX} and {_MIN_SECRET_BYTES} bytes or more in Base64"
        )
    return secret
