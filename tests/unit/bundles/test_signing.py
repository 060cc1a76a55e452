"""bundles/signing.py, files.py: only what a trusted key signed is loaded, and the bytes that were verified."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from neuronpipe.bundles.manifest import Manifest
from neuronpipe.bundles.repository import read_bundle, read_repository, read_trusted_repository
from neuronpipe.bundles.signing import SigningKey, TrustedKeys, create_key
from neuronpipe.bundles.writing import sign_bundle, write_manifest
from neuronpipe.core.errors import RefusedBundle, SetupError
from tests.unit.bundles.written import write_bundle

_BIN = "artifacts/openvino/model.bin"


class _Keys:
    """Pairs of files, made where they are first used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, name: str, kind: str) -> Path:
        if not (self._folder / f"{name}.key").exists():
            create_key(self._folder / f"{name}.key", self._folder / f"{name}.pub")
        return self._folder / f"{name}.{kind}"

    def private(self, name: str) -> SigningKey:
        return SigningKey.read(self._file(name, "key"), "--key")

    def public(self, name: str) -> Path:
        return self._file(name, "pub")

    def trusted(self, name: str) -> TrustedKeys:
        return TrustedKeys.read(self.public(name))


@pytest.fixture
def keys(tmp_path: Path) -> _Keys:
    (tmp_path / "keys").mkdir()
    return _Keys(tmp_path / "keys")


@pytest.fixture
def repository(tmp_path: Path, keys: _Keys) -> Path:
    """Two models, of which one has two versions. All are signed by the key "ours"."""
    for name, version in (("m", 1), ("m", 2), ("other", 1)):
        sign_bundle(write_bundle(tmp_path / "models", name, version), keys.private("ours"))
    return tmp_path / "models"


def _rewrite_manifest(folder: Path) -> None:
    """As whoever changed a file would: the digests fit again."""
    manifest = Manifest.read(folder / "manifest.json")
    kept = [folder / name for name in ("manifest.json", "signature.json")]
    moved = [path.rename(folder.parent / f".{path.name}") for path in kept]
    write_manifest(folder, manifest)
    for path, place in zip(moved[1:], kept[1:], strict=True):
        path.rename(place)


def _change(folder: Path) -> None:
    (folder / _BIN).write_bytes(b"changed")


def _change_with_manifest(folder: Path) -> None:
    _change(folder)
    _rewrite_manifest(folder)


def _add(folder: Path) -> None:
    (folder / "artifacts" / "late.so").write_bytes(b"")


def _add_with_manifest(folder: Path) -> None:
    _add(folder)
    _rewrite_manifest(folder)


def _add_linked_folder(folder: Path) -> None:
    (folder / "linked").symlink_to("/")


def _remove(folder: Path) -> None:
    (folder / _BIN).unlink()


def _swap_files(folder: Path) -> None:
    (folder / _BIN).rename(folder / "aside")
    (folder / "tokenizer.json").rename(folder / _BIN)
    (folder / "aside").rename(folder / "tokenizer.json")


def _swap_with_other_model(folder: Path) -> None:
    other = folder.parents[1] / "other" / "1"
    other.rename(folder.parents[1] / "aside")
    folder.rename(other)
    (folder.parents[1] / "aside").rename(folder)


def _roll_back(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "2", folder)


def _take_other_signature(folder: Path) -> None:
    shutil.copy(folder.parents[1] / "other" / "1" / "signature.json", folder)


def _touch_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 1 '))


def _remove_signature(folder: Path) -> None:
    (folder / "signature.json").unlink()


def _break_signature(folder: Path) -> None:
    (folder / "signature.json").write_text("{}")


def _change_signature(folder: Path) -> None:
    content = json.loads((folder / "signature.json").read_text())
    first = "B" if content["signature"][0] == "A" else "A"
    (folder / "signature.json").write_text(json.dumps(content | {"signature": first + content["signature"][1:]}))


_CHANGED = "its manifest or its signature was changed"
# What is done to m/1, and what the error says.
_TAMPERED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file is changed": (_change, f"m/1/{_BIN}: changed since it was compiled"),
    "a file is changed, and its digest": (_change_with_manifest, f"m/1: {_CHANGED}"),
    "a file is added": (_add, "m/1: 'artifacts/late.so' was added"),
    "a file is added, and its digest": (_add_with_manifest, f"m/1: {_CHANGED}"),
    "a linked folder is added": (_add_linked_folder, "m/1: 'linked' was added"),
    "a file is missing": (_remove, f"m/1/{_BIN}: missing"),
    "two files are swapped": (_swap_files, f"m/1/({_BIN}|tokenizer.json): changed"),
    "two models are swapped": (_swap_with_other_model, "m/1: its manifest is for other/1"),
    "an older version is put in place": (_roll_back, "m/1: its manifest is for m/2"),
    "the signature is another bundle's": (_take_other_signature, f"m/1: {_CHANGED}"),
    "a byte of the manifest is changed": (_touch_manifest, f"m/1: {_CHANGED}"),
    "the signature is removed": (_remove_signature, r"m/1: is not signed \(it has no signature.json\)"),
    "the signature is no signature": (_break_signature, "m/1/signature.json: does not hold a signature"),
    "the signature is changed": (_change_signature, f"m/1: {_CHANGED}"),
}


@pytest.mark.parametrize(("tamper", "said"), _TAMPERED.values(), ids=_TAMPERED)
def test_a_bundle_that_was_tampered_with_is_refused_by_what_was_done(
    repository: Path, keys: _Keys, tamper: Callable[[Path], None], said: str
) -> None:
    tamper(repository / "m/1")
    with pytest.raises(RefusedBundle, match=said):
        read_bundle(repository / "m/1", keys.trusted("ours")).files.check()


@pytest.mark.parametrize(("tamper", "said"), [(_add, "late.so"), (_add_linked_folder, "linked"), (_remove, _BIN)])
def test_files_that_are_not_those_of_the_manifest_are_refused_before_anything_is_loaded(
    repository: Path, keys: _Keys, tamper: Callable[[Path], None], said: str
) -> None:
    tamper(repository / "m/1")
    with pytest.raises(RefusedBundle, match=said):
        read_repository(repository, keys.trusted("ours"))


@pytest.mark.parametrize("tamper", [_change, _swap_files, _remove])
def test_a_file_of_a_signed_bundle_is_refused_when_it_is_loaded(
    repository: Path, keys: _Keys, tamper: Callable[[Path], None]
) -> None:
    bundle = read_bundle(repository / "m/1", keys.trusted("ours"))
    tamper(repository / "m/1")
    with pytest.raises(RefusedBundle, match=_BIN), bundle.artifact_files(bundle.artifact("openvino")):
        pass


def test_what_is_loaded_is_what_was_verified_whatever_happens_to_the_repository(repository: Path, keys: _Keys) -> None:
    bundle = read_bundle(repository / "m/1", keys.trusted("ours"))
    before = (repository / "m/1" / _BIN).read_bytes()
    with bundle.artifact_files(bundle.artifact("openvino")) as files:
        _change(repository / "m/1")
        assert [path.name for path in files] == ["model.xml", "model.bin"]
        assert files[1].read_bytes() == before
        assert files[0].parents[2].stat().st_mode & 0o777 == 0o700
    assert not any(path.exists() for path in files)


def test_an_untrusted_manifest_is_not_even_parsed(repository: Path, keys: _Keys) -> None:
    (repository / "m/1/manifest.json").write_text("[" * 100_000)
    with pytest.raises(RefusedBundle, match=_CHANGED):
        read_repository(repository, keys.trusted("ours"))


def test_every_bundle_of_a_repository_must_be_signed(repository: Path, keys: _Keys) -> None:
    assert {bundle.signer for bundle in read_repository(repository, keys.trusted("ours"))} == {keys.private("ours").id}
    write_bundle(repository, "other", 2)
    with pytest.raises(RefusedBundle, match=r"other/2: is not signed .* takes signed bundles only"):
        read_repository(repository, keys.trusted("ours"))


def test_a_signed_bundle_in_place_of_a_repository_is_verified(repository: Path, keys: _Keys) -> None:
    (bundle,) = read_repository(repository / "m/1", keys.trusted("ours"))
    assert bundle.signer
    with pytest.raises(RefusedBundle, match="does not have"):
        read_repository(repository / "m/1", keys.trusted("theirs"))


def test_signed_and_unsigned_bundles_load_where_no_keys_are_trusted(repository: Path) -> None:
    write_bundle(repository, "other", 2)
    assert [bundle.signer for bundle in read_trusted_repository(repository, None)] == [""] * 4


def test_a_bundle_is_the_same_for_caches_before_and_after_it_is_signed(tmp_path: Path, keys: _Keys) -> None:
    before = read_bundle(write_bundle(tmp_path))
    assert sign_bundle(before.folder, keys.private("ours")).digest == before.digest


def test_keys_are_rotated_without_a_gap(repository: Path, keys: _Keys, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_text("# rotated\n\n" + keys.public("ours").read_text() + keys.public("new").read_text())
    assert read_trusted_repository(repository, both)
    for folder in repository.glob("*/*"):
        sign_bundle(folder, keys.private("new"))
    for trusted in (both, keys.public("new")):
        assert len(read_trusted_repository(repository, trusted)) == 3
    with pytest.raises(RefusedBundle, match=r"is signed with the key [0-9a-f]{16}, which --trusted-keys .* not have"):
        read_trusted_repository(repository, keys.public("ours"))


def test_trusted_keys_may_be_a_folder_without_its_hidden_files(repository: Path, keys: _Keys, tmp_path: Path) -> None:
    folder = tmp_path / "trusted"
    (folder / "..data").mkdir(parents=True)
    (folder / ".swp").write_text("no key")
    with pytest.raises(SetupError, match="holds no public key"):
        read_trusted_repository(repository, folder)
    for name in ("ours", "new"):
        shutil.copy(keys.public(name), folder)
    assert read_trusted_repository(repository, folder)


def _pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


_KEY = _pem(ed25519.Ed25519PrivateKey.generate())  # three lines
_BROKEN = {
    "text": (_KEY + "\nssh-ed25519 AAAA\n", "line 5: is neither a key in PEM form nor a # comment"),
    "a damaged key": (_KEY + _KEY.replace("MCow", "AAAA"), "line 4: the key that begins here is not an ed25519 public"),
    "another kind of key": (
        _KEY + _pem(ec.generate_private_key(ec.SECP256R1())),
        "line 4: the key that begins here is not an ed25519 public key",
    ),
    "half a key": (_KEY + _KEY.rpartition("-----END")[0], "line 4: the key that begins here has no end"),
    "a private key": ("\n-----BEGIN PRIVATE KEY-----\nMC4C\n", "line 2: a private key"),
    "two in one": (_KEY.rpartition("-----END")[0] + _KEY, "line 1: the key that begins here is not"),
    "nothing": ("# none\n", "holds no public key"),
}


@pytest.mark.parametrize(("content", "said"), _BROKEN.values(), ids=_BROKEN)
def test_a_broken_file_of_keys_is_refused_by_its_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "trusted").write_text(content)
    with pytest.raises(SetupError, match=f"^--trusted-keys {tmp_path}/trusted: {said}") as refused:
        TrustedKeys.read(tmp_path / "trusted")
    assert "MC4C" not in str(refused.value)


def test_keys_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--trusted-keys .*/none: cannot be read: No such file"):
        TrustedKeys.read(tmp_path / "none")


@pytest.mark.parametrize("kind", ["none", "public", "P-256", "with a passphrase"])
def test_a_key_that_cannot_sign_is_refused_without_its_content(tmp_path: Path, keys: _Keys, kind: str) -> None:
    path, secret = tmp_path / "key", keys.public("ours").read_text()
    if kind == "P-256":
        subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path], check=True)
    elif kind == "with a passphrase":
        algorithm = ["-algorithm", "ed25519", "-aes256", "-pass", "pass:x"]
        subprocess.run(["openssl", "genpkey", *algorithm, "-out", path], check=True, capture_output=True)
    elif kind == "public":
        path.write_text(secret)
    with pytest.raises(SetupError, match=f"^--key {path}: (is not an ed25519 private key|cannot be read)") as refused:
        SigningKey.read(path, "--key")
    assert secret.splitlines()[1] not in str(refused.value)


def test_a_bundle_that_is_not_as_it_was_compiled_is_not_signed(tmp_path: Path, keys: _Keys) -> None:
    folder = write_bundle(tmp_path)
    _add(folder)
    with pytest.raises(RefusedBundle, match=r"late\.so"):
        sign_bundle(folder, keys.private("ours"))
    assert not (folder / "signature.json").exists()


def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path, keys: _Keys) -> None:
    folder = write_bundle(tmp_path / "models")
    files = read_bundle(folder).files
    (folder.parent / "outside").write_bytes(b"")
    with pytest.raises(RefusedBundle, match=r"'../outside', which is outside"):
        files.copy("../outside", tmp_path / "private")
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"tokenizer.json":', '"../outside":'))
    with pytest.raises(RefusedBundle):
        sign_bundle(folder, keys.private("ours"))


def test_a_pipe_in_place_of_a_file_does_not_hold_up_anybody(repository: Path, keys: _Keys) -> None:
    bundle = read_bundle(repository / "m/1", keys.trusted("ours"))
    (repository / "m/1/tokenizer.json").unlink()
    subprocess.run(["mkfifo", repository / "m/1/tokenizer.json"], check=True)
    with pytest.raises(RefusedBundle, match=r"tokenizer.json: missing"):
        bundle.tokenizer_json()


def test_a_private_key_is_never_overwritten_and_only_its_owners(tmp_path: Path) -> None:
    create_key(tmp_path / "key", tmp_path / "pub")
    content = (tmp_path / "key").read_bytes()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(SetupError, match=f"^{tmp_path}/key: cannot be written: File exists"):
        create_key(tmp_path / "key", tmp_path / "pub2")
    assert (tmp_path / "key").read_bytes() == content
    assert repr(SigningKey.read(tmp_path / "key", "--key")).startswith("<")


def test_openssl_makes_keys_and_verifies_signatures(tmp_path: Path) -> None:
    """As docs/security.md says."""
    private, public, folder = tmp_path / "key.pem", tmp_path / "pub.pem", write_bundle(tmp_path / "models")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    signer = sign_bundle(folder, SigningKey.read(private, "--key")).signer
    assert read_bundle(folder, TrustedKeys.read(public)).signer == signer
    script = f"""
        {{ echo 'neuronpipe bundle signature 1'; cat {folder}/manifest.json; }} > {tmp_path}/signed
        sed -n 's/.*"signature": "\\(.*\\)"/\\1/p' {folder}/signature.json | base64 -d > {tmp_path}/signature
        openssl pkeyutl -verify -rawin -pubin -inkey {public} -in {tmp_path}/signed -sigfile {tmp_path}/signature
        openssl pkey -pubin -in {public} -outform DER | sha256sum
    """
    said = subprocess.run(["bash", "-ec", script], check=True, capture_output=True, text=True).stdout
    assert "Signature Verified Successfully" in said
    assert signer in said
