"""Tells receivers that jobs have ended: a CloudEvent 1.0 by HTTP, signed as Standard Webhooks prescribe.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from neuronpipe.bulk.jobs.job import Job
from neuronpipe.bulk.jobs.post import Destination, Network, PostFailed, post, resolve
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.files import files_told
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics

_SECRET_PREFIX = "whsec_"  # noqa: S105 (what secrets begin with)
_MIN_SECRET_BYTES = 24
_LOOK_EVERY_S = 0.5
_AT_ONCE = 16
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 64 << 10
# Longer than one attempt takes.
_HOLD_S = 60.0
# After the first attempt, the second, …; a quarter more at random. Nearly two hours in all.
_DELAYS_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0)


class Notifier:
    """Takes jobs that have ended from the store, and tells their receivers."""

    def __init__(
        self, store: JobStore, secret: bytes, networks: Sequence[Network], meters: Meters, jobs_secret: bytes = b""
    ) -> None:
        """`networks`: those that may be reached besides public addresses. `jobs_secret`: of the gateways that sign
        jobs; empty to tell of all.
        """
        self._jobs_secret = jobs_secret
        self._store = store
        self._secret = secret
        self._networks = networks
        self._meters = meters

    @classmethod
    def of(cls, settings: WorkerSettings, store: JobStore, meters: Meters, jobs_secret: bytes) -> Self:
        """Raises SetupError."""
        try:
            networks = [
                ipaddress.ip_network(text)
                for text in filter(None, map(str.strip, settings.notification_networks.split(",")))
            ]
        except ValueError as error:
            raise SetupError(f"--notification-networks: {error}") from error
        return cls(store, read_secret(Path(settings.notification_secret)), networks, meters, jobs_secret)

    async def run(self) -> None:
        """Tells receivers until it is cancelled."""
        with ThreadPoolExecutor(_AT_ONCE, "notifications") as threads:
            self._threads = threads
            while True:
                taken: list[Job] = []
                try:
                    taken = await self._store.take_notifications(_AT_ONCE, _HOLD_S)
                    await asyncio.gather(*map(self._tell, taken))
                except NeuronpipeError as error:
                    log_warning("receivers cannot be told of jobs", problem=error.message)
                if len(taken) < _AT_ONCE:
                    await asyncio.sleep(_LOOK_EVERY_S)

    async def _tell(self, job: Job) -> None:
        """One attempt."""
        if self._jobs_secret and not job.is_signed(self._jobs_secret):
            log_warning("no receiver is told of a job that no gateway has signed", job=job.id)
            await self._store.end_notification(job.id)
            return
        try:
            await self._send(job)
        except (PostFailed, ValueError) as error:
            await self._postpone(job, str(error))
            return
        self._count("accepted")
        await self._store.end_notification(job.id)

    async def _send(self, job: Job) -> None:
        body = event_of(job)
        at_s = int(time.time())
        headers = {
            "content-type": "application/cloudevents+json; charset=utf-8",
            "user-agent": "neuronpipe",
            "webhook-id": job.id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": signature(self._secret, job.id, at_s, body),
        }
        to = Destination.of(job.notify)
        address = await resolve(to, self._networks)
        limits = (_TIMEOUT_S, _MAX_ANSWER_BYTES)
        answer = await post(to, address, headers, body, limits, self._threads)
        if not 200 <= answer.status < 300:  # redirects too: where they lead, nobody has allowed
            raise PostFailed(f"it answered {answer.status}")

    async def _postpone(self, job: Job, problem: str) -> None:
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


def event_of(job: Job) -> bytes:
    """The CloudEvent of a job that has ended. Its result is not in it: receivers get that as the job's caller."""
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
    """The header `webhook-signature`."""
    digest = hmac.new(secret, f"{id}.{at_s}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def read_secret(file: Path) -> bytes:
    """The secret in a file. Raises SetupError."""
    try:
        with files_told(f"--notification-secret {file}"):
            text = file.read_text(encoding="ascii").strip()
        secret = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret, text = b"", ""
    if not text.startswith(_SECRET_PREFIX) or len(secret) < _MIN_SECRET_BYTES:
        raise SetupError(
            f"--notification-secret {file}: must be {_SECRET_PREFIX} and {_MIN_SECRET_BYTES} bytes or more in Base64"
        )
    return secret
