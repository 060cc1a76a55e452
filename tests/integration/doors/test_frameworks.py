"""Frameworks against the HTTP door: their clients read out of our answers what our own client gets.

They are in an environment of their own, .venv-frameworks, which `make setup` makes; OpenAI's package for Node.js is in
node/node_modules.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision
from neuronpipe.client import Client
from tests.integration.frameworks.calls import CHAT, DOCUMENTS, MANY, MAX_TOKENS, QUERY, SCHEMA, TEXTS
from tests.systems.http_server import HttpServer, running_http_server

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_ROOT = Path(__file__).parents[3]
_PYTHON = _ROOT / ".venv-frameworks" / "bin" / "python"
_PROGRAM = Path(__file__).parents[1] / "frameworks" / "calls.py"
_NODE_PROGRAM = Path(__file__).parents[1] / "node" / "openai_client.js"
_LIMIT_S = 280
# float32 as decimals, and what a batch of another shape changes.
_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def writer(writer_folder: Path) -> Iterator[HttpServer]:
    """A server of the model that writes."""
    with running_http_server(writer_folder / "repository") as server:
        yield server


@pytest.fixture(scope="module")
def said(writer: HttpServer) -> Iterator[Callable[[int], str]]:
    """The answer to CHAT of so many tokens."""
    with Client(writer.process.target, timeout_s=120) as client:
        yield lambda tokens: client.generate_text("writer", messages=CHAT, max_new_tokens=tokens).text


def _ask(framework: str, server: HttpServer, home: Path, writer: HttpServer | None = None) -> dict[str, Any]:
    # No framework may report its use, read settings of who runs the tests, or load a list of models.
    environment = {"HOME": str(home), "HAYSTACK_TELEMETRY_ENABLED": "False", "NO_PROXY": "127.0.0.1"}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return _run([_PYTHON, _PROGRAM, framework, server.url, (writer or server).url], environment)


def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=_TOLERANCE)


def _best(client: Client) -> list[Any]:
    [best] = client.rerank("reranker", QUERY, DOCUMENTS, top_n=1)
    return [DOCUMENTS[best.index], pytest.approx(best.score, abs=_TOLERANCE)]


def test_litellm(
    http_server: HttpServer, writer: HttpServer, ours: Client, said: Callable[[int], str], tmp_path: Path
) -> None:
    found = _ask("litellm", http_server, tmp_path, writer)
    vectors = [ours.embed("minilm", text) for text in TEXTS]
    for way in ("embeddings", "vllm's embeddings"):
        _check(found[way], vectors)
    for way in ("chat", "vllm's chat", "async chat", "stream"):
        assert found[way] == said(MAX_TOKENS), way
    assert (found["response"], found["usage"]) == (said(16), MAX_TOKENS)  # it asks for 16 tokens at least
    for form in (found["form"], found["call"][1]):
        jsonschema.validate(json.loads(form), SCHEMA)
    [best] = ours.rerank("reranker", QUERY, DOCUMENTS, top_n=1)
    assert found["rerank"] == 4 * [[best.index, pytest.approx(best.score, abs=_TOLERANCE)]]


def test_langchain(
    http_server: HttpServer, writer: HttpServer, ours: Client, said: Callable[[int], str], tmp_path: Path
) -> None:
    found = _ask("langchain", http_server, tmp_path, writer)
    vectors = [ours.embed("minilm", text) for text in TEXTS]
    for way in ("chat", "async chat", "stream"):
        assert found[way] == said(MAX_TOKENS), way
    for way in ("form", "tool's form"):
        jsonschema.validate(found[way], SCHEMA)
    for way in ("documents", "async documents", "endpoint"):
        _check(found[way], vectors)
    _check(found["query"], vectors[0])
    _check(found["many"], [ours.embed("minilm", text) for text in MANY[::60]])
    _check(found["dimensions"], ours.embed("minilm", TEXTS[0], dimensions=7))
    assert "must be a HuggingFace repo ID, not a URL" in found["url as model"]  # as docs/clients.md says


def test_llama_index(
    http_server: HttpServer, writer: HttpServer, ours: Client, said: Callable[[int], str], tmp_path: Path
) -> None:
    found = _ask("llama_index", http_server, tmp_path, writer)
    vectors = [ours.embed("minilm", text) for text in TEXTS]
    for way in ("chat", "stream"):
        assert found[way] == said(MAX_TOKENS), way
    for way in ("openai", "tei", "async tei"):
        _check(found[way], vectors)
    for way in ("openai query", "tei query"):
        _check(found[way], vectors[0])
    assert found["rerank"] == _best(ours)


def test_haystack(
    http_server: HttpServer, writer: HttpServer, ours: Client, said: Callable[[int], str], tmp_path: Path
) -> None:
    found = _ask("haystack", http_server, tmp_path, writer)
    vectors = [ours.embed("minilm", text) for text in TEXTS]
    for way in ("chat", "stream", "tgi chat"):
        assert found[way] == said(MAX_TOKENS), way
    for form in (json.loads(found["form"]), found["call"][1]):
        jsonschema.validate(form, SCHEMA)
    for way in ("openai", "tei"):
        _check(found[way], vectors)
    for way in ("openai query", "tei query"):
        _check(found[way], vectors[0])
    _check(found["tei query as by default"], ours.embed("minilm", TEXTS[0], normalize=False))
    assert found["rerank"] == _best(ours)


def test_openais_package_for_node(
    http_server: HttpServer, writer: HttpServer, ours: Client, said: Callable[[int], str]
) -> None:
    given = {"texts": TEXTS, "messages": CHAT, "max_tokens": MAX_TOKENS, "schema": SCHEMA}
    found = _run(["node", _NODE_PROGRAM, http_server.url, writer.url, json.dumps(given)])
    _check(found["embeddings"], [ours.embed("minilm", text) for text in TEXTS])
    assert found["models"] == [model.name for model in ours.list_models()]
    for way in ("chat", "stream", "final", "response"):
        assert found[way] == said(MAX_TOKENS), way
    for form in (found["form"], found["call"]["arguments"]):
        jsonschema.validate(json.loads(form), SCHEMA)
    assert found["refused"] == [404, "model_not_found"]


def test_tei_client(http_server: HttpServer, ours: Client, tmp_path: Path) -> None:
    found = _ask("tei_client", http_server, tmp_path)
    assert (found["healthy"], found["kinds"]) == (True, ["embedding", "classifier", "reranker"])
    _check(found["embed"], [ours.embed("minilm", text) for text in TEXTS])
    assert found["decode"] == [TEXTS[0].lower()]
    labels = [ours.classify("classifier", text, top_k=4) for text in TEXTS]
    assert [[pair[0] for pair in answer] for answer in found["classify"]] == [
        [label.label for label in some] for some in labels
    ]
    _check(
        [[pair[1] for pair in answer] for answer in found["classify"]],
        [[label.score for label in some] for some in labels],
    )
    ranked = ours.rerank("reranker", QUERY, DOCUMENTS)
    _check(found["rerank"], [[rank.index, rank.score] for rank in ranked])


def test_anthropic(http_server: HttpServer, writer: HttpServer, said: Callable[[int], str], tmp_path: Path) -> None:
    found = _ask("anthropic", http_server, tmp_path, writer)
    assert (found["whole"], found["stream"]) == (said(MAX_TOKENS), said(MAX_TOKENS))
    assert found["ends"] == ["max_tokens", "max_tokens", MAX_TOKENS]
    assert found["tokens"][0] == found["tokens"][1] > 0
    assert found["tokens"][2] > 500  # more than the model takes
    jsonschema.validate(found["form"], SCHEMA)
    jsonschema.validate(found["output form"], SCHEMA)
    stop, *ends = found["stop"]
    assert ends == [stop, "stop_sequence"]
    assert found["refused"] == "not_found_error"
    assert "tool_runner(thread=False)" in found["thread"]
    assert found["alone"] == found["whole"]
    assert found["id"][0] == f"msg_{found['id'][1]}"
    assert found["models"] == [["writer", "writer", 0]]


def test_voyage(http_server: HttpServer, ours: Client, tmp_path: Path) -> None:
    found = _ask("voyage", http_server, tmp_path)
    _check(found["embed"], [ours.embed("minilm", text) for text in TEXTS])
    binary = EmbeddingPrecision.EMBEDDING_PRECISION_BINARY
    packed = [ours.embed("minilm", text, precision=binary, dimensions=16).tolist() for text in TEXTS]
    assert found["binary"] == packed
    assert found["tokens"] > len(TEXTS)
    [best] = ours.rerank("reranker", QUERY, DOCUMENTS, top_n=1)
    assert found["rerank"] == [[best.index, DOCUMENTS[best.index], pytest.approx(best.score, abs=_TOLERANCE)]]
    assert found["all"] == len(DOCUMENTS)
    assert found["query"] == found["embed"]  # the model has no prompts
    assert "nobody" in found["refused"]
    assert "is not served" in found["refused"]


def test_sagemaker_runtime(http_server: HttpServer, ours: Client, tmp_path: Path) -> None:
    found = _ask("sagemaker", http_server, tmp_path)
    labels = [
        {top.label: pytest.approx(top.score, abs=_TOLERANCE) for top in ours.classify("classifier", text, top_k=4)}
        for text in TEXTS
    ]
    for form in ("csv", "lines"):
        assert [{label["label"]: label["score"] for label in answer} for answer in found[form]] == labels
    [answer] = found["json"]
    assert {label["label"]: label["score"] for label in answer} == labels[0]
    _check(np.squeeze(found["target model"]), ours.embed("minilm", TEXTS[0]))
    # Asynchronous invocations are jobs, which this server has no Redis for.
    assert (found["refused"], found["stream"], found["async"]) == (400, 404, 501)
