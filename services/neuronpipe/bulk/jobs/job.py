"""A job as the store has it, and its form as an operation of google.longrunning."""

import dataclasses
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from google.longrunning.operations_pb2 import Operation
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.jobs_pb2 import JobMetadata, JobPriority, JobResult, JobState
from neuronpipe.core.errors import Cancelled, DeadlineExceeded, NeuronpipeError
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


@dataclass(frozen=True, slots=True)
class Job:
    """A job. Times are Redis's, in milliseconds since 1970; 0 for what has not happened.

    `end`: the form of `end_of`, empty before. `request`: the serialized SubmitInferenceRequest, empty once it has
    ended. `invocation`: in place of it, an Invocation of SageMaker's clients as JSON. `trace`: the traceparent of the
    submitter. `limit_s`: of the work on an input.
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
        """The job of a hash, whose fields have no units in their names."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(cls)[1:]:
            value = fields.get(one.name.removesuffix("_ms").removesuffix("_s").encode(), b"")
            found[one.name] = value.decode() if one.type is str else int(value or 0) if one.type is int else value
        return cls(id, **found)

    @property
    def name(self) -> str:
        """The name of its operation."""
        return f"{_NAME}{self.id}"

    def is_signed(self, secret: bytes) -> bool:
        """Whether a gateway with this secret stored it as it is."""
        own = self.id, self.tenant, self.priority, self.digest, self.request_id, self.notify, self.limit_s
        content = self.invocation.encode() or self.request
        is_content = not content or hashlib.sha256(content).hexdigest() == self.digest
        return is_content and hmac.compare_digest(self.signature, job_signature(secret, own))

    @property
    def span(self) -> SpanContext | None:
        """The span in which it was submitted; None for none."""
        return SpanContext.parse(self.trace) if self.trace else None

    def operation(self) -> Operation:
        """Its operation."""
        operation, metadata = Operation(name=self.name, done=bool(self.end)), self._metadata()
        if self.end[:1] == _RESULT:
            result = JobResult.FromString(self.end[1:])
            metadata.inputs = metadata.completed_inputs = result.succeeded + result.failed
            operation.response.CopyFrom(_packed(result))
        elif self.end:
            operation.error.CopyFrom(Status.FromString(self.end[1:]))
        operation.metadata.CopyFrom(_packed(metadata))
        return operation

    def _metadata(self) -> JobMetadata:
        metadata = JobMetadata(
            state=JobState.Value(f"JOB_STATE_{self.state.upper()}"),
            request_id=self.request_id,
            priority=_PRIORITY_OF[self.priority],
            inputs=self.inputs,
            completed_inputs=self.completed,
            attempts=self.attempts,
            create_time=_timestamp(self.created_ms),
            expire_time=_timestamp(self.expires_ms),
        )
        if self.started_ms:
            metadata.start_time.CopyFrom(_timestamp(self.started_ms))
        if self.ended_ms:
            metadata.end_time.CopyFrom(_timestamp(self.ended_ms))
        return metadata


# Of a job's own fields, those that its gateway signs, with its id, its tenant, its priority and the digest of its
# content: what of it a worker acts on.
SIGNED_FIELDS = ("request_id", "notify", "limit")


def job_signature(secret: bytes, own: Sequence[str | int]) -> str:
    """What a gateway writes into a job."""
    return hmac.new(secret, json.dumps([str(part) for part in own]).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job that is submitted. `key`: what makes it the same as an earlier one, of which `digest` is the content."""

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
    """A job that a worker has, until its lease ends. `left_s`: of its time to live."""

    job: Job
    entry: str
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


@dataclass(slots=True)
class Progress:
    """How far a job is. `has_begun`: anything was sent to the gateway."""

    completed: int = 0
    has_begun: bool = False

    def begin(self) -> None:
        """Something is sent."""
        self.has_begun = True


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one priority: jobs that wait, jobs that workers have, and for how long the first one waits."""

    waiting: int
    running: int
    oldest_s: float


def end_of(outcome: JobResult | NeuronpipeError) -> bytes:
    """How a job ended, as the store keeps it."""
    if isinstance(outcome, NeuronpipeError):
        return b"".join((_ERROR, to_status(outcome).SerializeToString()))
    return b"".join((_RESULT, outcome.SerializeToString()))


def expired() -> DeadlineExceeded:
    """The error of a job whose time to live is over."""
    return DeadlineExceeded("the job's time to live was over before it ended")


def cancelled() -> Cancelled:
    """The error of a job that its caller cancelled."""
    return Cancelled("the job was cancelled")


def new_id() -> str:
    """An id that nobody can guess. Ids sort by time."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def id_of(name: str) -> str:
    """The id in an operation's name; empty for another name."""
    id = name.removeprefix(_NAME)
    return id if id != name and id.isalnum() and id.isascii() else ""


def _packed(message: JobMetadata | JobResult) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _timestamp(milliseconds: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMilliseconds(milliseconds)
    return stamp
