"""What /openapi.json promises, tried by schemathesis: requests made from the schemas, right ones and wrong ones."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.suite.sampling import sample_of
from tests.systems.http_server import HttpServer

pytestmark = [pytest.mark.local_only, pytest.mark.long]

# Requests for each operation and each kind, where the suite is whole.
_EXAMPLES = 5
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
# What is answered with 501, as its summary says; and the console's path, which is not in the document.
_LEFT_OUT = (
    r"^/$|^/v2/(cuda|system)sharedmemory|^/v2/(logging|trace)|^/v2/repository/models/|/trace/setting"
    r"|^/v1/jobs|/async-invocations$"  # this gateway has no Redis for jobs
)
# Words that lead to a model, of which made-up ones hardly ever do.
_WORDS = {
    "name": ["minilm", "classifier", "extractor", "answerer", "tagger", "filler", "entailer", "reranker", "viewer"],
    "task": ["feature-extraction", "text-classification", "question-answering", "fill-mask"],
    "model": ["minilm", "classifier", "reranker"],
    "neuronpipe-model": ["minilm", "classifier"],
    "neuronpipe-version": ["1", "2"],
}


def _narrowed(document: Any) -> Any:
    """The document with words that lead to a model, and deadlines that can be met."""
    if isinstance(document, list):
        return [_narrowed(item) for item in document]
    if not isinstance(document, dict):
        return document
    if "in" in document and document.get("name") in _WORDS:
        return document | {"schema": {"enum": _WORDS[document["name"]]}}
    if document.get("name") == "x-request-timeout-ms":
        return document | {"schema": document["schema"] | {"minimum": 60_000}}
    narrowed = {name: _narrowed(value) for name, value in document.items()}
    if "model" in narrowed.get("properties", {}):
        narrowed["properties"]["model"] = {"enum": _WORDS["model"]}
    return narrowed


def test_answers_are_what_the_document_promises(
    http_server: HttpServer, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(_narrowed(httpx.get(f"{http_server.url}/openapi.json").json())))
    program = str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "--no-color", "run", str(file), "--url", http_server.url]
    checks = ["--checks", ",".join(_CHECKS), "--exclude-path-regex", _LEFT_OUT, "--phases", "coverage,fuzzing"]
    examples = math.ceil(sample_of(pytestconfig).share * _EXAMPLES)
    bounds = [
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--generation-database",
        "none",
        "--no-shrink",
        "--workers",
        "1",
    ]
    ended = subprocess.run([*command, *checks, *bounds], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
