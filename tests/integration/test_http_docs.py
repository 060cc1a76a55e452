"""docs/http.md: its examples run as they stand, and its table is the code's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.rpc import code_pb2
from PIL import Image

from neuronpipe.core.status import CODES as GRPC_CODES
from neuronpipe.gateway.doors.http.problems import CODES
from tests.integration.http_server import HttpServer

_PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
_BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_PYTHON = [code for language, code in _BLOCKS if language == "python"]
_CURL = [line.removeprefix("$ ") for language, code in _BLOCKS if language == "console" for line in code.splitlines() if "curl" in line]


def _on(server: HttpServer, code: str) -> str:
    """An example against the server of the tests, in which sentiment is called classifier."""
    return code.replace("127.0.0.1:8080", server.address).replace("sentiment", "classifier")


def test_the_examples_are_found() -> None:
    assert (len(_PYTHON), len(_CURL)) == (3, 8)


@pytest.mark.local_only
@pytest.mark.parametrize("code", _PYTHON, ids=lambda code: code.split()[1])
def test_python_examples_run(http_server: HttpServer, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", _on(http_server, code)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.local_only
@pytest.mark.parametrize("line", _CURL)
def test_curl_examples_run(http_server: HttpServer, line: str, tmp_path: Path) -> None:
    Image.new("RGB", (40, 30)).save(tmp_path / "cat.jpg")
    command = _on(http_server, line).replace("curl ", "curl --silent --fail-with-body ")
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_table_of_errors_is_the_codes() -> None:
    rows = [
        f"| {kind.__name__} | {code_pb2.Code.Name(GRPC_CODES[kind])} | {codes.status} | {codes.openai_type} | {codes.openai_code} "
        f"| {codes.tei_type} |"
        for kind, codes in CODES.items()
    ]
    assert "\n".join(rows) in _PAGE
