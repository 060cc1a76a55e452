"""Each example of examples/ does what its page says, against a gateway."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import transformers

from demo.processes import ServiceProcess
from neuronpipe.api.v1.tasks_pb2 import ScoreFunction
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest
from neuronpipe.api.v1.traces_pb2_grpc import TraceServiceStub
from neuronpipe.client import Client
from neuronpipe.core.names import Spans
from tests.models.compiling import compile_model
from tests.models.repository import bert_config, link_models, save
from tests.systems.pipelines import UNPREPARED

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_EXAMPLES = Path(__file__).parents[3] / "examples"
_TEXT = "You are a fool, and this is a very poor article."
_SIGMOID = ScoreFunction.SCORE_FUNCTION_SIGMOID
_START_LIMIT_S = 60


@pytest.fixture(scope="module")
def gateway(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a gateway with a model for each example."""
    folder = tmp_path_factory.mktemp("examples")
    models = link_models(folder / "repository", repository, "minilm", "multi-label")
    reranker = save(transformers.BertForSequenceClassification(bert_config(num_labels=1)), folder / "reranker")
    compile_model(reranker, models, "rerank", name="reranker")
    options = ("--repository", str(models), "--kept-traces", "100")
    with ServiceProcess("all", *options, environment=UNPREPARED) as process:
        yield process.wait_until_ready().target


def _run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, timeout=240)


def _skip_unless_installed(language: str) -> None:
    """Looks for Debian's packages that the page names for `language`."""
    commands = re.findall(r"apt-get install ((?:[^\n]|\\\n)+)", (_EXAMPLES / "README.md").read_text())
    (packages,) = [command.replace("\\", "").split() for command in commands if language in command]
    # Of a name that other packages merely mention, dpkg-query knows a status too.
    states = _run("dpkg-query", "-Wf", "${db:Status-Status} ", *packages) if shutil.which("dpkg-query") else None
    if states is None or states.stdout.split() != ["installed"] * len(packages):
        pytest.skip("its packages of Debian are not installed: examples/README.md")


def _output(*command: str | Path) -> str:
    ended = _run(*command)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_semantic_search_finds_the_paragraph_by_its_meaning(gateway: str, tmp_path: Path) -> None:
    (tmp_path / "kitchen.md").write_text(
        "# Bread\n\nMix flour, water and yeast, and let the dough rise.\n\nSalt goes in last."
    )
    (tmp_path / "garden").mkdir()
    (tmp_path / "garden/trees.txt").write_text("Apple trees are pruned in winter.\n\nPears need more sun.")
    (tmp_path / "notes.pdf").write_bytes(b"not read")
    lines = _output(
        sys.executable,
        _EXAMPLES / "semantic_search.py",
        tmp_path,
        "How do I bake a loaf?",
        "--target",
        gateway,
        "--top",
        "5",
    ).splitlines()
    assert len(lines) == 5
    assert "kitchen.md" in lines[0]
    assert "kitchen.md" in lines[1]
    scores = [float(line.split()[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)


def test_semantic_search_takes_a_paragraph_and_a_query_that_are_longer_than_the_model_takes(
    gateway: str, tmp_path: Path
) -> None:
    (tmp_path / "long.md").write_text("Mix flour, water and yeast. " + "The dough rises for an hour. " * 100)
    (tmp_path / "short.txt").write_text("Apple trees are pruned in winter.")
    command = (sys.executable, _EXAMPLES / "semantic_search.py", tmp_path, "How do I bake a loaf? " * 100)
    first, second = _output(*command, "--target", gateway).splitlines()
    assert "long.md" in first
    assert "short.txt" in second


def test_retrieval_puts_the_reranked_candidates_into_the_prompt(gateway: str, tmp_path: Path) -> None:
    passages = [
        "Apple trees are pruned in winter.",
        "The dough rises for an hour.",
        "Trains leave at nine.",
        "Bread is baked at 230 degrees.",
    ]
    (tmp_path / "passages.txt").write_text("\n".join(passages))
    question = "How long does bread dough take?"
    prompt = _output(
        *(sys.executable, _EXAMPLES / "rag_rerank.py", tmp_path / "passages.txt", question, "--target", gateway),
        *("--candidates", "2", "--top", "2"),
    )
    about_bread = [passages[1], passages[3]]
    with Client(gateway) as client:
        ranked = [about_bread[text.index] for text in client.rerank("reranker", question, about_bread)]
    assert re.findall(r"^\[\d\] (.*)$", prompt, re.MULTILINE) == ranked
    assert prompt.endswith(f"Question: {question}\nAnswer:\n")


def test_retrieval_takes_passages_that_are_longer_than_the_models_take(gateway: str, tmp_path: Path) -> None:
    long = "The dough rises for an hour. " * 200
    (tmp_path / "passages.txt").write_text(f"{long}\nTrains leave at nine.")
    command = (sys.executable, _EXAMPLES / "rag_rerank.py", tmp_path / "passages.txt", "How long does dough take?")
    assert long.strip() in _output(*command, "--target", gateway)


@contextmanager
def _service(script: str, *options: str) -> Iterator[str]:
    """The URL of an example that serves HTTP on a free port."""
    process = subprocess.Popen(
        [sys.executable, str(_EXAMPLES / script), "--port", "0", *options],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:  # ends with the process
            lines.append(line)
            if running := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                yield running[1]
                return
        pytest.fail(f"{script} ended: {''.join(lines)}")
    finally:
        process.terminate()
        process.communicate(timeout=_START_LIMIT_S)


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


def test_moderation_acts_by_the_worst_label_that_is_bad(gateway: str) -> None:
    comments = [_TEXT, "A fine day.", "The train is late again, and nobody says why.", "Thank you."]
    with Client(gateway) as client:
        found = [client.classify("multi-label", text, top_k=4, function=_SIGMOID) for text in comments]
    worst = [
        max((label for label in labels if label.label in ("busy", "lost")), key=lambda label: label.score)
        for labels in found
    ]
    review, block = sorted(bad.score for bad in worst)[1] - 1e-3, sorted(bad.score for bad in worst)[3] - 1e-3
    expected = ["block" if bad.score >= block else "review" if bad.score >= review else "pass" for bad in worst]
    assert set(expected) == {"pass", "review", "block"}

    limits = ("--review", str(review), "--block", str(block))
    with _service(
        "moderation.py", "--labels", "busy,lost", "--model", "multi-label", "--target", gateway, *limits
    ) as url:
        decisions = _post(f"{url}/moderate", {"comments": [*comments, "", "so " * 2000]})["decisions"]
    assert [decision["action"] for decision in decisions[:4]] == expected
    assert [decision["label"] for decision in decisions[:4]] == [bad.label for bad in worst]
    assert [decision["score"] for decision in decisions[:4]] == pytest.approx([bad.score for bad in worst], abs=1e-5)
    assert decisions[4] == {"action": "review", "label": "", "score": 0.0}  # refused by the model, so a person looks
    assert decisions[5]["label"] in ("busy", "lost")  # too long, and judged by its beginning


async def test_a_neighbours_caller_finds_the_gateways_spans_in_its_own_trace(gateway: str) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    query = urllib.parse.urlencode({"text": _TEXT})
    with _service("traced_service.py", "--model", "multi-label", "--target", gateway) as url:
        request = urllib.request.Request(
            f"{url}/sentiment?{query}", headers={"traceparent": f"00-{trace_id}-{parent_id}-01"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.loads(response.read())
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/sentiment?text=", timeout=30)
        refused.value.close()
    assert refused.value.code == 400
    with Client(gateway) as client:
        (best,) = client.classify("multi-label", _TEXT)
    assert (answer["label"], answer["score"]) == (best.label, pytest.approx(best.score, abs=1e-5))
    assert (await _parents(gateway, trace_id))[Spans.INFER] == parent_id


async def _parents(target: str, trace_id: str) -> dict[str, str]:
    """The spans of a trace by name, with their parents' ids, once the gateway has the request's."""
    deadline_s = time.monotonic() + _START_LIMIT_S
    async with grpc.aio.insecure_channel(target) as channel:
        stub = TraceServiceStub(channel)
        while time.monotonic() < deadline_s:
            found = json.loads((await stub.GetTrace(GetTraceRequest(trace_id=trace_id))).otlp_json)
            scopes = [scope for resource in found["resourceSpans"] for scope in resource["scopeSpans"]]
            spans = {span["name"]: span.get("parentSpanId", "") for scope in scopes for span in scope["spans"]}
            if Spans.INFER in spans:
                return spans
            await asyncio.sleep(0.05)
    raise AssertionError(f"no trace {trace_id}")


def _labels(gateway: str) -> list[str]:
    with Client(gateway) as client:
        return [f"{label.label} {label.score:.6f}" for label in client.classify("multi-label", _TEXT, top_k=3)]


def test_go_client_gets_the_same_labels(gateway: str, tmp_path: Path) -> None:
    _skip_unless_installed("golang")
    _output(_EXAMPLES / "go/build.sh", tmp_path)
    program = (tmp_path / "classify", "-target", gateway, "-top-k", "3", "-model")
    assert _output(*program, "multi-label", _TEXT).splitlines() == _labels(gateway)
    refused = _run(*program, "none", _TEXT)
    assert refused.returncode == 1
    assert "NotFound: model 'none' is not served" in refused.stderr
    vector = _output(tmp_path / "classify", "-target", gateway, "-model", "minilm", "-embed", _TEXT)
    with Client(gateway) as client:
        expected = client.embed("minilm", _TEXT)
    assert [float(number) for number in vector.strip(" []\n").split()] == pytest.approx(expected, abs=1e-5)
    assert _run(tmp_path / "classify").returncode == 2


def test_java_client_gets_the_same_labels(gateway: str, tmp_path: Path) -> None:
    _skip_unless_installed("jdk")
    _output(_EXAMPLES / "java/build.sh", tmp_path)
    program = ("java", "-cp", (tmp_path / "classpath").read_text().strip(), "Classify", gateway)
    assert _output(*program, "multi-label", "3", _TEXT).splitlines() == _labels(gateway)
    refused = _run(*program, "none", "3", _TEXT)
    assert refused.returncode == 1
    assert "NOT_FOUND: model 'none' is not served" in refused.stderr
    assert refused.stderr.endswith(" (MODEL_NOT_FOUND)\n")
    assert " (INVALID_INPUT), field text" in _run(*program, "multi-label", "3", "").stderr
    vector = json.loads(_output(*program, "minilm", "embed", _TEXT))
    with Client(gateway) as client:
        assert vector == pytest.approx(client.embed("minilm", _TEXT), abs=1e-5)
    without = _run(*program)
    assert (without.returncode, without.stderr) == (2, "usage: Classify HOST:PORT MODEL LABELS TEXT\n")


def test_node_client_gets_the_same_labels(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Path(__file__).parents[1] / "node/node_modules"
    if not shutil.which("node") or not modules.is_dir():
        pytest.skip("Node.js and its packages are not installed: make setup")
    monkeypatch.setenv("NODE_PATH", str(modules))
    program = ("node", _EXAMPLES / "node/classify.js", gateway)
    assert _output(*program, "multi-label", "3", _TEXT).splitlines() == _labels(gateway)
    refused = _run(*program, "none", "3", _TEXT)
    assert refused.returncode == 1
    assert "NOT_FOUND: model 'none' is not served" in refused.stderr


def test_every_example_is_on_the_page_with_its_command() -> None:
    page = (_EXAMPLES / "README.md").read_text()
    files = {
        path.relative_to(_EXAMPLES) for pattern in ("*.py", "*/*.sh", "*/*.js") for path in _EXAMPLES.glob(pattern)
    }
    assert len(files) == 8
    assert [path for path in files if f"examples/{path} " not in page] == []
