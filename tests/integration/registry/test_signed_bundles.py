"""--trusted-keys of every service: real processes refuse bundles before anything in them is loaded."""

import contextlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.processes import ServiceProcess
from neuronpipe.bundles.manifest import Manifest
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.bundles.signing import SigningKey, TrustedKeys, create_key
from neuronpipe.bundles.writing import sign_bundle, write_manifest
from neuronpipe.client import Client
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from tests.suite.commands import run

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_SERVICES = ("all", "gateway", "tokenizer", "neuron-executor", "postprocessor")
_TARGETS = [f"--{stage}-target=127.0.0.1:9" for stage in ("tokenizer", "executor", "postprocessor")]


@dataclass(frozen=True)
class _Signed:
    """A repository with one bundle, and the key that signed it."""

    repository: Path
    bundle: Path
    key: Path
    public: Path

    def sign(self, key: Path) -> None:
        sign_bundle(self.bundle, SigningKey.read(key, "--key"))


def _signed(folder: Path, source: Path) -> _Signed:
    bundle = folder / "models" / source.parent.name / source.name
    shutil.copytree(source, bundle)
    create_key(folder / "key", folder / "public")
    signed = _Signed(folder / "models", bundle, folder / "key", folder / "public")
    signed.sign(signed.key)
    return signed


@pytest.fixture
def signed(repository: Path, tmp_path: Path) -> _Signed:
    return _signed(tmp_path, repository / "classifier" / "1")


def _refusal(service: str, signed: _Signed, trusted: Path, *options: str) -> str:
    """What a service that refuses to start logs and says."""
    targets = _TARGETS if service == "gateway" else []
    where = ("--listen", "127.0.0.1:0", "--repository", str(signed.repository))
    environment = {f"NEURONPIPE_{service.replace('-', '_').upper()}_TRUSTED_KEYS": str(trusted)}
    process = run("serve", service, *targets, *options, *where, environment=environment)
    assert process.returncode == 2, process.stderr
    assert '"event": "a bundle is refused"' in process.stderr
    assert "ready" not in process.stderr
    return process.stderr


def test_signed_bundles_are_served_and_the_log_says_by_which_key(signed: _Signed) -> None:
    with ServiceProcess("all", "--repository", str(signed.repository), "--trusted-keys", str(signed.public)) as process:
        process.wait_until_ready()
        assert process.wait_for("bundle signature verified")["key"] == SigningKey.read(signed.key, "--key").id
        with Client(process.target) as client:
            assert client.classify("classifier", "A fine day.")


@pytest.mark.parametrize("service", _SERVICES)
def test_no_service_takes_a_bundle_that_is_not_signed(service: str, signed: _Signed) -> None:
    (signed.bundle / "signature.json").unlink()
    assert f"{signed.bundle}: is not signed" in _refusal(service, signed, signed.public)


def test_no_front_process_takes_a_bundle_that_is_not_signed(signed: _Signed) -> None:
    (signed.bundle / "signature.json").unlink()
    assert "is not signed" in _refusal("all", signed, signed.public, "--front-processes", "1")


_PAYLOAD = """
import pathlib, sys, torch

class Payload:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(sys.argv[1]),)

torch.save({"constant": Payload()}, sys.argv[2])
"""


def _poison(bundle: Path, marker: Path, scratch: Path) -> None:
    """Puts code into a torch artefact, and its digest into the manifest."""
    (artefact,) = bundle.rglob("*.pt2")
    subprocess.run([sys.executable, "-c", _PAYLOAD, marker, scratch / "payload"], check=True)
    with zipfile.ZipFile(artefact) as before:
        entries = [(entry, before.read(entry)) for entry in before.infolist()]
    with zipfile.ZipFile(artefact, "w", zipfile.ZIP_STORED) as after:
        for entry, content in entries:
            is_sample = "sample_inputs" in entry.filename and entry.filename.endswith(".pt")
            after.writestr(entry.filename, (scratch / "payload").read_bytes() if is_sample else content)
    manifest, signature = Manifest.read(bundle / "manifest.json"), (bundle / "signature.json").read_bytes()
    for name in ("manifest.json", "signature.json"):
        (bundle / name).unlink()
    write_manifest(bundle, manifest)
    (bundle / "signature.json").write_bytes(signature)


def test_code_in_a_torch_artefact_runs_where_it_is_loaded_and_a_signature_keeps_it_out(
    torch_repository: Path, tmp_path: Path
) -> None:
    signed, marker = _signed(tmp_path, torch_repository / "classifier" / "1"), tmp_path / "code-ran"

    def load(trusted: TrustedKeys | None) -> None:
        bundle = read_bundle(signed.bundle, trusted)
        artifact = bundle.artifact("torch")
        with bundle.artifact_files(artifact) as files:
            load_backend("torch", BackendRequest(bundle.spec, files, artifact.properties, cores=1, threads=1)).close()

    trusted = TrustedKeys.read(signed.public)
    load(trusted)
    _poison(signed.bundle, marker, tmp_path)
    with pytest.raises(RefusedBundle, match="was changed after it was signed"):
        load(trusted)
    assert not marker.exists()
    with contextlib.suppress(SetupError):  # what the code leaves is no artefact
        load(None)
    assert marker.exists(), "PyTorch no longer runs code of artefacts: say so in docs/security.md"
