"""The Python client: `AsyncClient`, `Client` for code without asyncio, their options and errors.

The client needs only gRPC, protobuf and NumPy.
"""

from neuronpipe.client.asynchronous import AsyncClient
from neuronpipe.client.jobs import AsyncJob, JobStatus
from neuronpipe.client.synchronous import Client, Job
from neuronpipe.core.errors import (
    AlreadyExists,
    Cancelled,
    ChangeRefused,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    JobNotFound,
    ModelNotFound,
    NeuronpipeError,
    NotAllowed,
    NotConfigured,
    Overloaded,
    SetupError,
    Unauthenticated,
    Unavailable,
    WrongTask,
)
from neuronpipe.platform.tls import TlsFiles

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncJob",
    "Cancelled",
    "ChangeRefused",
    "Client",
    "DeadlineExceeded",
    "InternalError",
    "InvalidInput",
    "Job",
    "JobNotFound",
    "JobStatus",
    "ModelNotFound",
    "NeuronpipeError",
    "NotAllowed",
    "NotConfigured",
    "Overloaded",
    "SetupError",
    "TlsFiles",
    "Unauthenticated",
    "Unavailable",
    "WrongTask",
]
