"""The settings of jobs: at a gateway, and of workers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote

from pydantic import Field, model_validator

from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.settings import Settings
from neuronpipe.core.units import words_of
from neuronpipe.platform.process.settings import ServiceSettings
from neuronpipe.platform.storage import ObjectUri
from neuronpipe.platform.tls import TlsFiles

MAX_TTL_S = 7 * 86_400
MAX_WORK_S = 3600
_TENANT = "{tenant}"
_MIN_SECRET_BYTES = 32


class JobStoreSettings(Settings):
    """The Redis database that keeps jobs."""

    jobs_redis_url: str = Field(  # may hold a password
        "",
        repr=False,
        description="Redis for jobs, as redis://HOST:PORT/0, with maxmemory-policy noeviction and appendonly yes, and "
        "not the Redis of the caches (see docs/jobs.md); empty: none",
    )
    jobs_secret: str = Field(
        "",
        description="file of the secret, 32 bytes or more, with which gateways sign jobs; workers that have it run "
        "only signed jobs; read at start; empty: any writer of the Redis of jobs can run jobs",
    )


class JobSettings(JobStoreSettings):
    """Jobs, at a gateway."""

    jobs_uris: str = Field(
        "",
        description="folders in which jobs may read and write objects, with commas, as s3://BUCKET/jobs/{tenant}/ or "
        "file:///data/, with {tenant} for the caller's tenant; workers reach them; empty: none",
    )
    jobs_max_tenant_bytes: int = Field(
        64 << 20,
        ge=1 << 10,
        description="memory of Redis for the jobs of one tenant, with the results of ended jobs, in bytes; more "
        "are refused with RESOURCE_EXHAUSTED",
    )
    jobs_retention_s: int = Field(
        86_400, ge=1, le=30 * 86_400, description="seconds for which results are kept after jobs have ended"
    )
    jobs_notification_hosts: str = Field(
        "", description="hosts to notify of ended jobs, with commas; *.example.com: all below it; empty: none"
    )
    jobs_sagemaker_output: str = Field(
        "", description="folder for results of InvokeEndpointAsync, in jobs_uris; empty: such calls are refused"
    )

    @model_validator(mode="after")
    def _check_uris(self) -> Self:
        self.job_folders("tenant")
        if self.jobs_sagemaker_output:
            ObjectUri.parse(self.jobs_sagemaker_output.replace(_TENANT, "tenant"))
        return self

    def job_folders(self, tenant: str) -> list[ObjectUri]:
        """Returns the folders in which a tenant's jobs may read and write."""
        return [ObjectUri.parse(uri.replace(_TENANT, _step(tenant))) for uri in words_of(self.jobs_uris)]

    def sagemaker_folder(self, tenant: str) -> str:
        """Returns the folder for results of SageMaker's clients, with a slash at its end; empty without a folder."""
        folder = self.jobs_sagemaker_output.replace(_TENANT, _step(tenant))
        return f"{folder.rstrip('/')}/" if folder else ""


def _step(tenant: str) -> str:
    """Returns a tenant's name as one step of a URI's path.

    Characters other than letters, digits and -._~ are quoted twice: in the path, and in the URI of the path.
    """
    return quote(quote(tenant, safe=""), safe="")


def read_secret(option: str, file: str) -> bytes:
    """Reads the secret in a file. Raises SetupError."""
    with reporting_os_errors(f"{option} {file}"):
        secret = Path(file).read_bytes().strip()
    if len(secret) < _MIN_SECRET_BYTES:
        raise SetupError(f"{option} {file}: has {len(secret)} bytes, must have {_MIN_SECRET_BYTES} or more")
    return secret


class JobCommandSettings(Settings):
    """Settings of `neuronpipe job dead`."""

    prefix: ClassVar[str] = "NEURONPIPE_JOB_"

    jobs: JobStoreSettings


class WorkerSettings(ServiceSettings):
    """Settings of a worker, which runs jobs."""

    prefix: ClassVar[str] = "NEURONPIPE_WORKER_"
    defaults: ClassVar[Mapping[str, Any]] = {"listen": "127.0.0.1:50054"}

    jobs: JobStoreSettings

    target: str = Field("127.0.0.1:50050", description="gRPC target of the gateway that the worker calls")
    http_target: str = Field(
        "", description="the gateway's HTTP address, http://HOST:PORT, for InvokeEndpointAsync; empty: such jobs fail"
    )
    tls_ca: str = Field(
        "", description="file of the authorities of the gateway's certificate, in PEM form; empty: no TLS to it"
    )
    gateway_tls_certificate: str = Field(
        "", description="file of the certificate to show the gateway, in PEM form; empty: tls_certificate itself"
    )
    gateway_tls_key: str = Field("", description="file of the private key of gateway_tls_certificate; empty: tls_key")
    max_jobs: int = Field(8, ge=0, le=1024, description="jobs at once; 0: none, the worker only informs KEDA")
    max_requests_in_flight: int = Field(
        8,
        ge=1,
        le=4096,
        description="requests of all jobs of the worker at the gateway at once; more requests make larger batches, and "
        "longer tails of interactive requests",
    )
    lease_s: float = Field(
        30.0, ge=1, le=3600, description="seconds after which other workers take the jobs of a dead worker"
    )
    max_attempts: int = Field(3, ge=1, le=100, description="workers that may die with a job before it is set aside")
    max_input_bytes: int = Field(64 << 20, ge=1 << 10, description="largest object that a job may read, in bytes")
    max_input_lines: int = Field(1_000_000, ge=1, description="maximum number of lines in a file of inputs")
    max_result_bytes: int = Field(
        4 << 20, ge=1 << 10, description="largest result in Redis, in bytes; outcomes beyond it become errors"
    )
    notification_secret: str = Field(
        "",
        description="file of the secret that signs notifications, as whsec_ and Base64; read at start; empty: other "
        "workers send them",
    )
    notification_networks: str = Field(
        "",
        description="networks to which notifications may go, with commas, as 10.1.0.0/16; empty: only public addresses",
    )

    @property
    def gateway_tls_files(self) -> TlsFiles | None:
        """The files of the connection to the gateway; None without TLS. Raises SetupError."""
        own = TlsFiles(self.gateway_tls_certificate, self.gateway_tls_key, self.tls_ca)
        return self.tls.client_files("--gateway-tls-certificate", own, "the authorities of the gateway")
