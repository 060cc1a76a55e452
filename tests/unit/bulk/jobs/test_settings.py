"""bulk/jobs/settings.py and job.py: tenants in the paths of URIs, and what gateways sign."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bulk.jobs.job import StoredJob, job_signature
from neuronpipe.bulk.jobs.settings import JobSettings, read_secret
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.storage import parse_below

_SECRET = b"a secret of thirty-two bytes, or more"


@pytest.mark.parametrize("uris", ["file:///jobs/{tenant}/", "s3://bucket/jobs/{tenant}"])
def test_a_tenant_is_one_step_of_a_path_whatever_its_name(uris: str) -> None:
    settings = JobSettings(jobs_uris=uris, jobs_sagemaker_output=uris)
    start = uris.partition("{")[0]
    names = ("mallory", "mallory/eu", "mallory%2feu", "mallory%2Feu", "a?b", "a#b", "a b", "é")
    folders = {name: str(settings.job_folders(name)[0]).rstrip("/") for name in names}
    assert folders["mallory"] == f"{start}mallory"
    assert folders["mallory/eu"] == f"{start}mallory%2Feu"
    assert len(set(folders.values())) == len(names)
    for name in names:
        parse_below(f"{settings.sagemaker_folder(name)}key.out", settings.job_folders(name))
        for other in set(names) - {name}:
            with pytest.raises(ValueError, match="must be below"):
                parse_below(f"{settings.sagemaker_folder(name)}key.out", settings.job_folders(other))


def test_a_secret_is_a_file_of_32_bytes(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(SetupError, match="--jobs-secret"):
        read_secret("--jobs-secret", str(file))
    file.write_text("short\n")
    with pytest.raises(SetupError, match="has 5 bytes, must have 32 or more"):
        read_secret("--jobs-secret", str(file))
    file.write_bytes(_SECRET + b"\n")
    assert read_secret("--jobs-secret", str(file)) == _SECRET


def _job() -> StoredJob:
    fields = {"tenant": "a", "priority": "low", "request_id": "r", "notify": "https://x/", "limit": "900"}
    digest = hashlib.sha256(b"request").hexdigest()
    signature = job_signature(_SECRET, ("id", "a", "low", digest, "r", "https://x/", 900))
    written = {**fields, "digest": digest, "signature": signature, "request": "request"}
    return StoredJob.of("id", {name.encode(): value.encode() for name, value in written.items()})


def test_a_signed_job_is_as_its_gateway_stored_it() -> None:
    assert _job().is_signed(_SECRET)
    assert replace(_job(), request=b"").is_signed(_SECRET)  # it has ended
    assert not _job().is_signed(b"another secret of thirty-two bytes")


@pytest.mark.parametrize(
    "change",
    [
        {"id": "other"},
        {"tenant": "b"},
        {"priority": "high"},
        {"request": b"other"},
        {"invocation": "{}"},
        {"notify": "https://y/"},
        {"limit_s": 3600},
        {"signature": ""},
    ],
)
def test_a_job_that_was_changed_is_not_signed(change: dict[str, Any]) -> None:
    assert not replace(_job(), **change).is_signed(_SECRET)
