"""cli/bundle.py, and the options of other commands that sign and verify."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from neuronpipe import cli
from neuronpipe.bundles.manifest import Source
from tests.unit.bundles.written import write_bundle
from tests.unit.cli.running import run_command


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with two bundles and a key."""
    monkeypatch.chdir(tmp_path)
    for name in ("m", "other"):
        write_bundle(tmp_path / "models", name)
    cli.main(["bundle", "keygen", "--key", "key.pem", "--public-key", "public.pem"])
    return tmp_path


def _run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    """The exit code, and what is said."""
    capsys.readouterr()
    code, *said = run_command(capsys, *command.split())
    return code, "".join(said)


def test_bundles_are_signed_and_verified_by_their_folders(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _run(capsys, "bundle sign models/m/1 models/other/1 --key key.pem")
    key = said.rsplit(maxsplit=1)[-1]
    assert (code, said.splitlines()) == (
        0,
        [
            f"models/m/1: signed m version 1, 3 files with the key {key}",
            f"models/other/1: signed other version 1, 3 files with the key {key}",
        ],
    )
    expected = (0, f"models/m/1: m version 1, 3 files, signed with the key {key}\n")
    assert _run(capsys, "bundle verify models/m/1 --trusted-keys public.pem") == expected


def test_what_differs_between_two_bundles_is_said(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    second = folder / "models/m/2"
    write_bundle(folder / "models", "m", 2, cache_results=True)
    manifest = json.loads((second / "manifest.json").read_text())
    (second / "tokenizer.json").unlink()  # it is the first one's, too
    (second / "tokenizer.json").write_text("{ }")
    (second / "notes.txt").write_text("12345")
    manifest["files"]["tokenizer.json"] = sha256(b"{ }").hexdigest()
    manifest["files"]["notes.txt"] = sha256(b"12345").hexdigest()
    (second / "manifest.json").write_text(json.dumps(manifest))
    assert _run(capsys, "bundle diff models/m/1 models/m/2") == (
        0,
        "cache_results: false -> true\n"
        "model.version: 1 -> 2\n"
        "notes.txt: only in models/m/2, 5 bytes\n"
        "tokenizer.json: differs, 2 -> 3 bytes\n"
        # model.bin of 256 bytes and model.xml of 8.
        "264 of 272 bytes are the same in both\n",
    )
    assert _run(capsys, "bundle diff models/m/1 models/m/1") == (0, "266 of 266 bytes are the same in both\n")


def test_settings_that_begin_alike_differ_where_they_are_long(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for version in (3, 4):
        location = "/" + 100 * "x" + str(version)
        write_bundle(folder / "models", "m", version, source=Source(location=location, weights_sha256=""))
    assert "source.location: " in _run(capsys, "bundle diff models/m/3 models/m/4")[1]


def test_a_bundle_that_is_refused_ends_the_command_with_the_code_of_a_bundle(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    _run(capsys, "bundle sign models/m/1 --key key.pem")
    (folder / "models/m/1/tokenizer.json").write_text("[]")
    code, said = _run(capsys, "bundle verify models/m/1 --trusted-keys public.pem")
    expected = (2, "neuronpipe: models/m/1/tokenizer.json: changed since it was compiled")
    assert (code, said.partition(" (")[0]) == expected


def test_a_command_without_trusted_keys_is_told_that_it_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _run(capsys, "bundle verify models/m/1")
    assert code == 2
    assert "--trusted-keys" in said


_COMPILE = "compile SOURCE --backend openvino --repository models --name m --if-missing --sign-key key.pem"


def test_the_compile_step_does_not_sign_a_bundle_that_somebody_else_put_there(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    code, said = _run(capsys, _COMPILE)
    assert (code, said.partition(" (")[0]) == (2, "neuronpipe: models/m/1: is not signed")
    assert not (folder / "models/m/1/signature.json").exists()
    _run(capsys, "bundle sign models/m/1 --key key.pem")
    assert _run(capsys, _COMPILE) == (0, "models/m/1\n")


def test_a_key_that_cannot_be_read_ends_a_compilation_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = _run(capsys, "compile SOURCE --repository models --sign-key public.pem")
    expected = (2, "neuronpipe: --sign-key public.pem: is not an ed25519 private key")
    assert (code, said.partition(" in PEM")[0]) == expected


def test_the_cache_is_not_warmed_by_an_unsigned_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "texts").write_text("A fine day.\n")
    redis = "--redis-url redis://127.0.0.1:9/0"
    code, said = _run(
        capsys, f"cache warm --repository models --model m --texts texts --trusted-keys public.pem {redis}"
    )
    assert (code, said.partition(" (")[0]) == (2, "neuronpipe: models/m/1: is not signed")
