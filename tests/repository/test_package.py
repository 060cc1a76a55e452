"""What is published besides the code: the protos for other languages, and the data of the package and its citation."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypeAlias

import pytest
import yaml
from grpc_tools import protoc

import neuronpipe
from neuronpipe.api.protos import PUBLIC
from neuronpipe.doors.native import INFERENCE_SERVICE, MODEL_SERVICE

Factory: TypeAlias = pytest.TempPathFactory

_ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The folder that the command has written."""
    subprocess.run([sys.executable, "-m", "neuronpipe.api.protos", "--out", tmp_path], check=True)
    return tmp_path


def test_the_written_protos_are_those_of_the_public_api(written: Path) -> None:
    files = sorted(str(file.relative_to(written)) for file in written.rglob("*") if file.is_file())
    assert files == sorted(PUBLIC)
    assert [name for name in files if (written / name).read_bytes() != (_ROOT / "protos" / name).read_bytes()] == []


def test_the_written_protos_import_only_each_other_and_protobuf(written: Path, tmp_path_factory: Factory) -> None:
    out = tmp_path_factory.mktemp("generated")
    own = Path(protoc.__file__).parent / "_proto"  # google/protobuf/any.proto and its like, which every protoc has
    assert protoc.main(["protoc", f"-I{written}", f"-I{own}", f"--python_out={out}", *PUBLIC]) == 0
    assert len(list(out.rglob("*_pb2.py"))) == len(PUBLIC)


def test_the_written_protos_have_every_public_service(written: Path) -> None:
    text = "\n".join((written / name).read_text() for name in PUBLIC)
    services = (INFERENCE_SERVICE.name, MODEL_SERVICE.name)
    assert [service for service in services if f"\nservice {service} {{" not in text] == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "neuronpipe.api.protos", "--out", str(tmp_path / "file")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == f"python -m neuronpipe.api.protos: --out {tmp_path / 'file'}: Not a directory\n"


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == neuronpipe.__version__
    assert citation["license"] == project["license"]
    assert citation["repository-code"] == project["urls"]["Source"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]
