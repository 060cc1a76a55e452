"""cli/bundle.py, and the options of other commands that sign and verify."""

from pathlib import Path

import pytest

from neuronpipe import cli
from tests.unit.bundles.written import write_bundle


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
    code = 0
    try:
        cli.main(command.split())
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, "".join(capsys.readouterr())


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
    assert _run(capsys, "bundle verify models/m/1 --trusted-keys public.pem") == (
        0,
        f"models/m/1: m version 1, 3 files, signed with the key {key}\n",
    )


def test_a_bundle_that_is_refused_ends_the_command_with_the_code_of_a_bundle(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    _run(capsys, "bundle sign models/m/1 --key key.pem")
    (folder / "models/m/1/tokenizer.json").write_text("[]")
    code, said = _run(capsys, "bundle verify models/m/1 --trusted-keys public.pem")
    assert (code, said.partition(" (")[0]) == (
        2,
        "neuronpipe: models/m/1/tokenizer.json: changed since it was compiled",
    )


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
    assert (code, said.partition(" in PEM")[0]) == (
        2,
        "neuronpipe: --sign-key public.pem: is not an ed25519 private key",
    )


def test_the_cache_is_not_warmed_by_a_model_that_nobody_signed(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "texts").write_text("A fine day.\n")
    redis = "--redis-url redis://127.0.0.1:9/0"
    code, said = _run(
        capsys, f"cache warm --repository models --model m --texts texts --trusted-keys public.pem {redis}"
    )
    assert (code, said.partition(" (")[0]) == (2, "neuronpipe: models/m/1: is not signed")
