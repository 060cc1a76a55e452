"""A job as the store has it, and its form as an operation of google.longrunning."""

import asyncio
import dataclasses
import hashlib
import hmac
import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from google.longrunning.operations_pb2 import Operation
from google.protobuf.any import pack
from google.protobuf.message import DecodeError
from google.protobuf.timestamp import from_milliseconds
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.jobs_pb2 import JobMetadata, JobPriority, JobResult, JobState
from neuronpipe.core.errors import Cancelled, DeadlineExceeded, InternalError, NeuronpipeError
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import SpanContext

PRIORITIES = {
    JobPriority.JOB_PRIORITY_UNSPECIFIED: "normal",
    JobPriority.JOB_PRIORITY_HIGH: "high",
    JobPriority.JOB_PRIORITY_NORMAL: "normal",
    JobPriority.JOB_PRIORITY_LOW: "low",
}
_PRIORITY_OF = {word: number for number, word in PRIORITIES.items() if number}
EndState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
_RESULT, _ERROR = b"r", b"e"
_NAME = "jobs/"
# A ListPlace: its time, and an id as `new_id` makes it.
_TOKEN = re.compile(r"([0-9a-f]{12})([0-9a-f]{32})")
# The log's event for a job whose fields cannot be read.
DAMAGED_EVENT = "a job in Redis is damaged"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job. Times are Redis's, in milliseconds since 1970; 0 for events that have not happened.

    - `end`: the form of `end_of`; empty until the job ends.
    - `request`: the serialized SubmitInferenceRequest; empty after the job has ended.
    - `invocation`: for the other kind of job, instead of `request`: an Invocation of SageMaker's clients as JSON.
    - `trace`: the traceparent of the submitter.
    - `limit_s`: for the work on an input.
    """

    id: str
    tenant: str
    priority: str
    state: str
    request_id: str
    request: bytes
    trace: str
    invocation: str
    notify: str
    end: bytes
    created_ms: int
    started_ms: int
    ended_ms: int
    expires_ms: int
    limit_s: int
    inputs: int
    completed: int
    attempts: int
    notified: int
    digest: str = ""
    signature: str = ""

    @classmethod
    def of(cls, id: str, fields: Mapping[bytes, bytes]) -> Self:
        """Reads a job from its hash, whose fields have no units in their names. Raises ValueError if it is damaged."""
        values: dict[str, Any] = {}
        for job_field in dataclasses.fields(cls)[1:]:
            value = fields.get(stored_name(job_field.name).encode(), b"")
            values[job_field.name] = (
                value.decode() if job_field.type is str else int(value or 0) if job_field.type is int else value
            )
        return cls(id, **values)

    @classmethod
    def damaged(cls, id: str, tenant: str) -> Self:
        """Returns a job that has failed, for a job whose fields cannot be read."""
        fields = {"tenant": tenant, "priority": "normal", "state": "failed"}
        return cls.of(id, {b"end": end_of(damage()), **{name.encode(): fields[name].encode() for name in fields}})

    @property
    def name(self) -> str:
        return f"{_NAME}{self.id}"

    def is_signed(self, secret: bytes) -> bool:
        """Returns whether a gateway with this secret stored the job in its current form."""
        signed_fields = self.id, self.tenant, self.priority, self.digest, self.request_id, self.notify, self.limit_s
        content = self.invocation.encode() or self.request
        is_content = not content or hashlib.sha256(content).hexdigest() == self.digest
        return is_content and hmac.compare_digest(self.signature, job_signature(secret, signed_fields))

    @property
    def span(self) -> SpanContext | None:
        """The span in which the job was submitted; None without a span."""
        return SpanContext.parse(self.trace) if self.trace else None

    def operation(self) -> Operation:
        """Returns the job as an operation. Raises ValueError if a field is damaged."""
        try:
            return self._operation()
        except (KeyError, DecodeError) as error:
            raise ValueError(f"{self.name}: a field is damaged") from error

    def _operation(self) -> Operation:
        operation, metadata = Operation(name=self.name, done=bool(self.end)), self._metadata()
        if self.end[:1] == _RESULT:
            result = JobResult.FromString(self.end[1:])
            metadata.inputs = metadata.completed_inputs = result.succeeded + result.failed
            operation.response.CopyFrom(pack(result))
        elif self.end:
            operation.error.CopyFrom(Status.FromString(self.end[1:]))
            if self.end[:1] != _ERROR or not operation.error.code:
                raise ValueError(f"{self.name}: its end is neither a result nor an error")
        operation.metadata.CopyFrom(pack(metadata))
        return operation

    def _metadata(self) -> JobMetadata:
        metadata = JobMetadata(
            state=JobState.Value(f"JOB_STATE_{self.state.upper()}"),
            request_id=self.request_id,
            priority=_PRIORITY_OF[self.priority],
            inputs=self.inputs,
            completed_inputs=self.completed,
            attempts=self.attempts,
            create_time=from_milliseconds(self.created_ms) if self.created_ms else None,
            expire_time=from_milliseconds(self.expires_ms) if self.expires_ms else None,
        )
        if self.started_ms:
            metadata.start_time.CopyFrom(from_milliseconds(self.started_ms))
        if self.ended_ms:
            metadata.end_time.CopyFrom(from_milliseconds(self.ended_ms))
        return metadata


def stored_name(field: str) -> str:
    """Returns the name that a field of StoredJob has in its hash."""
    return field.removesuffix("_ms").removesuffix("_s")


# The fields of a job that its gateway signs, with the job's id, tenant, priority and the digest of its content: workers
# act on all of these.
SIGNED_FIELDS = ("request_id", "notify", "limit")


def job_signature(secret: bytes, signed_fields: Sequence[str | int]) -> str:
    """Returns the signature that a gateway writes into a job."""
    return hmac.new(secret, json.dumps([str(part) for part in signed_fields]).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that is submitted. `key`: equal for equal jobs. `digest`: the digest of its content, then also equal."""

    id: str
    key: str
    digest: str
    tenant: str
    priority: str
    request: bytes
    ttl_s: int
    retention_s: int
    fields: Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job that a worker has, until its lease ends. `left_s`: the rest of its time to live."""

    job: StoredJob
    left_s: float


@dataclass(frozen=True, slots=True)
class Invocation:
    """An asynchronous invocation of SageMaker's clients: an object that is a body for an endpoint."""

    endpoint: str
    input_uri: str
    content_type: str
    accept: str
    output_uri: str = ""
    failure_uri: str = ""


class ListPlace(NamedTuple):
    """The place of a job in its tenant's list, by the time of its submission. The place outlives the job.

    `created_ms`: by Redis's clock, as in the list; the time in the id is by the clock of a gateway.
    """

    created_ms: int
    id: str

    @classmethod
    def parse(cls, token: str) -> Self | None:
        """Returns the place that a token stands for; None for another text."""
        match = _TOKEN.fullmatch(token)
        return cls(int(match[1], 16), match[2]) if match else None

    @property
    def token(self) -> str:
        return f"{self.created_ms:012x}{self.id}"


@dataclass(slots=True)
class JobProgress:
    """The progress of a job.

    - `has_begun`: whether anything was sent to the gateway.
    - `is_stalled`: whether its object cannot be written now.
    - `lease_ends_s`: by the clock of time.monotonic.
    """

    completed: int = 0
    has_begun: bool = False
    is_stalled: bool = False
    lease_ends_s: float = math.inf
    _renewed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self) -> None:
        self.has_begun = True

    def renew(self, lease_ends_s: float) -> None:
        self.lease_ends_s = lease_ends_s
        self._renewed.set()

    async def leased(self) -> None:
        """Returns while the lease lasts, or when it is renewed: after its end, another worker may have the job."""
        while time.monotonic() > self.lease_ends_s:
            self._renewed.clear()
            await self._renewed.wait()


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a priority: waiting jobs, running jobs, and the seconds for which the first job has waited."""

    waiting: int
    running: int
    oldest_s: float


def end_of(outcome: JobResult | NeuronpipeError) -> bytes:
    """Returns the end of a job as the store keeps it."""
    if isinstance(outcome, NeuronpipeError):
        return b"".join((_ERROR, to_status(outcome).SerializeToString()))
    return b"".join((_RESULT, outcome.SerializeToString()))


def expired() -> DeadlineExceeded:
    """Returns the error of a job whose time to live is over."""
    return DeadlineExceeded("the job's time to live was over before it ended")


def cancelled() -> Cancelled:
    """Returns the error of a job that its caller cancelled."""
    return Cancelled("the job was cancelled")


def damage() -> InternalError:
    """Returns the error of a job whose fields cannot be read."""
    return InternalError("the job is damaged in Redis")


def new_id() -> str:
    """Returns an id that cannot be guessed. Ids sort by time."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def id_of(name: str) -> str:
    """Returns the id in an operation's name; empty for another name."""
    id = name.removeprefix(_NAME)
    return id if id != name and id.isalnum() and id.isascii() else ""
