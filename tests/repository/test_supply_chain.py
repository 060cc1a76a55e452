"""docker/sbom.py and docker/audit.py: what images hold is listed, and asked about."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from neuronpipe import __version__
from tests.documentation.pages import ROOT

pytestmark = pytest.mark.sampled

_DOCKER = ROOT / "docker"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _DOCKER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_sbom, _audit = _script("sbom"), _script("audit")


def _stages() -> dict[str, str]:
    """The stages of the Dockerfile that are images of ours, and what each does."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", (_DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    stages = {name: (base, text) for base, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    texts = {name: (stages[base][1] if base in stages else "") + text for name, (base, text) in stages.items()}
    return {name: text for name, text in texts.items() if "title=" in text}


def test_every_image_has_a_bill_of_the_locks_that_it_installs() -> None:
    stages = _stages()
    assert stages.keys() == _sbom.IMAGES.keys()
    for image, text in stages.items():
        installed = re.findall(r"sh /opt/pip/install /opt/neuronpipe (.+)$", text, re.MULTILINE)
        locks = [word for words in installed for word in words.split() if not word.startswith("--")]
        assert tuple(locks or ["neuron"]) == _sbom.IMAGES[image]
        assert f"COPY --from=sbom /sbom/{image}.cdx.json /usr/share/sbom/neuronpipe.cdx.json" in text, image


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sbom")
    subprocess.run([sys.executable, _DOCKER / "sbom.py", folder], check=True)
    return folder


@pytest.mark.parametrize("image", _sbom.IMAGES)
def test_a_bill_is_as_the_schema_wants_it_and_names_every_package_of_the_locks(bills: Path, image: str) -> None:
    written = (bills / f"{image}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(written) is None
    bill = json.loads(written)
    assert (bill["specVersion"], bill["metadata"]["component"]["name"]) == ("1.6", f"neuronpipe/{image}")
    locks = "".join((_DOCKER / "requirements" / f"{lock}.txt").read_text() for lock in _sbom.IMAGES[image])
    pinned = {line.split(" ")[0] for line in locks.splitlines() if re.match(r"\w.*==", line)}
    components = bill["components"]
    named = {f"{component['name']}=={component['version']}" for component in components}
    assert named == {*pinned, f"neuronpipe=={__version__}"}
    others = [component["purl"] for component in components if component["name"] != "neuronpipe"]
    assert all(purl.startswith("pkg:pypi/") for purl in others)


def test_a_bill_is_the_same_whenever_it_is_made(bills: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, _DOCKER / "sbom.py", tmp_path, "compile"], check=True)
    assert (tmp_path / "compile.cdx.json").read_bytes() == (bills / "compile.cdx.json").read_bytes()


# --- advisories -------------------------------------------------------------------------------------------------------

# What an index answers for a package and its version; None: that it is out of order.
_Answer = Callable[[str, str], list[str] | None]


@contextmanager
def _index(answer: _Answer) -> Iterator[str]:
    """An index of advisories that speaks OSV's API."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            package = asked["package"]
            advisories = answer(package["name"], asked["version"])
            content = json.dumps(
                {"vulns": [_advisory(advisory, package) for advisory in advisories or []]} if advisories else {}
            )
            self.send_response(503 if advisories is None else 200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *values: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def _advisory(id: str, package: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "summary": "a summary", "affected": [{"package": package}]}


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two locks. Of one package they have different versions, and one package has a local version."""
    (tmp_path / "a.txt").write_text("one==1.0 \\\n    --hash=sha256:00\ntorch==2.13.0+cpu \\\n    --hash=sha256:00\n")
    (tmp_path / "b.txt").write_text("# made\none==2.0 ; python_version < '3'\ntwo-parts==3.1\n")
    monkeypatch.setattr(_audit, "_LOCKS", tmp_path)
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["audit.py", *options])
    with pytest.raises(SystemExit) as ended:
        _audit.main()
    return int(ended.value.code or 0), capsys.readouterr().out


def _knows(*vulnerable: tuple[str, str]) -> _Answer:
    return lambda name, version: ["PYSEC-1"] if (name, version) in {*vulnerable, ("jinja2", "2.4.1")} else []


@pytest.mark.usefixtures("locks")
def test_an_index_that_knows_nothing_of_the_packages_lets_them_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _index(_knows()) as url:
        assert _run(monkeypatch, capsys, "--osv-url", url, "--required") == (
            0,
            "4 of 4 packages checked, 0 with known vulnerabilities\n",
        )


@pytest.mark.usefixtures("locks")
def test_known_vulnerabilities_fail_by_package_and_lock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with _index(_knows(("one", "2.0"), ("torch", "2.13.0"))) as url:
        code, said = _run(monkeypatch, capsys, "--osv-url", url)
    assert (code, said.splitlines()[:2]) == (
        1,
        ["VULNERABLE: one 2.0 (b.txt): PYSEC-1", "VULNERABLE: torch 2.13.0 (a.txt): PYSEC-1"],
    )


@pytest.mark.usefixtures("locks")
def test_what_was_found_is_told_where_the_index_fails_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_audit, "_AT_ONCE", 1)
    known = _knows(("one", "1.0"))
    with _index(lambda name, version: None if name == "two-parts" else known(name, version)) as url:
        code, said = _run(monkeypatch, capsys, "--osv-url", url)
    assert code == 1
    assert "VULNERABLE: one 1.0 (a.txt): PYSEC-1\nSKIPPED: 1 of 4 packages" in said
    assert "known vulnerabilities: two-parts; the index of advisories does not answer: " in said


@pytest.mark.usefixtures("locks")
@pytest.mark.parametrize("answers", [True, False], ids=["an index that knows nothing", "no index"])
def test_without_an_index_it_is_told_what_was_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    with _index(lambda name, version: []) as url:
        asked = url if answers else "http://127.0.0.1:9/v1/query"  # the discard port: nobody listens
        for options, expected in (((), 0), (("--required",), 3)):
            code, said = _run(monkeypatch, capsys, "--osv-url", asked, *options)
            assert code == expected
            assert said.startswith("SKIPPED: 4 of 4 packages of docker/requirements were not checked")
