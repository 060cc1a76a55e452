"""tritonclient against the Open Inference Protocol: it reads out of our answers what our own client gets."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import Aggregation, ScoreFunction
from neuronpipe.bundles.repository import read_repository
from neuronpipe.client import Client
from neuronpipe.tasks.inputs.images import read_pixels
from tests.callers.triton_calls import Case
from tests.models.repository import tokenizer
from tests.systems.http_server import HttpServer

pytestmark = pytest.mark.local_only

_LIMIT_S = 120
_TEXTS = ["Ann lives in a house in Paris.", "A fine day."]
# float32 as decimals, and what a batch of another shape changes.
_TOLERANCE = 1e-6
_WAYS = (
    *("grpc", "grpc, gzip", "grpc.aio", "grpc, async_infer", "grpc, stream"),
    *("http", "http, gzip", "http, deflate", "http, JSON", "http.aio"),
)
_MANY_ROWS = 64  # with vectors of 384 numbers more than 64 KiB, from which on answers are compressed


def _objects(*rows: Any) -> Any:
    return np.array(rows, object)


def _encoded() -> dict[str, Any]:
    """Both texts as the models' tokenizer has them: int64 [2, tokens], the second padded."""
    arrays = tokenizer()(_TEXTS, padding=True, return_tensors="np")
    return {name: arrays[name].astype(np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}


def _pixels(repository: Path, image: bytes) -> Any:
    spec = next(bundle.spec for bundle in read_repository(repository) if bundle.spec.name == "viewer")
    assert spec.image
    return read_pixels(image, spec.image)[None]


@pytest.fixture(scope="module")
def cases(image: bytes, http_repository: Path) -> dict[str, Case]:
    texts = _objects(*([text] for text in _TEXTS))
    pixels = _pixels(http_repository, image)
    (pixels_name,) = [
        bundle.spec.inputs[0] for bundle in read_repository(http_repository) if bundle.spec.name == "viewer"
    ]
    return {
        "classify": Case("classifier", {"text": texts}, {"top_k": 2, "function": "sigmoid"}),
        "embed": Case("minilm", {"text": texts}),
        "embed many": Case("minilm", {"text": _objects(*([f"text {row}"] for row in range(_MANY_ROWS)))}),
        "answer": Case("answerer", {"question": _objects(["Who?"]), "context": _objects([_TEXTS[0]])}, {"top_k": 3}),
        "find entities": Case("tagger", {"text": texts}, {"aggregation": "simple"}),
        "fill masks": Case("filler", {"text": _objects(["Ann [MASK] in [MASK]."])}, {"top_k": 3}),
        "compare": Case("minilm/sentence_similarity", {"source": _objects([_TEXTS[0]]), "texts": _objects(_TEXTS)}),
        "rerank": Case(
            "reranker", {"query": _objects(["Who?"]), "texts": _objects(_TEXTS)}, outputs=("score", "index")
        ),
        "classify zero shot": Case(
            "entailer", {"text": texts[:1], "candidate_labels": _objects(["home", "work"])}, {"multi_label": True}
        ),
        "extract features": Case("extractor", {"text": texts}),
        "classify image": Case("viewer", {"image": _objects([image])}),
        "raw classifier": Case("classifier/raw", _encoded()),
        "raw classifier, int32": Case("classifier/raw", {k: v.astype(np.int32) for k, v in _encoded().items()}),
        "raw tagger": Case("tagger/raw", _encoded()),
        "raw image": Case("viewer/raw", {pixels_name: pixels}),
        "unknown model": Case("unknown", {"text": texts}),
        "wrong input": Case("classifier", {"context": texts}),
        "wrong parameter": Case("classifier", {"text": texts}, {"topk": 2}),
        "wrong row": Case("classifier", {"text": _objects(["fine"], [""])}),
        "id outside of the vocabulary": Case("classifier/raw", {"input_ids": np.array([[101, 99_999, 102]])}),
    }


def _call(grpc_address: str, http_address: str, cases: list[Case]) -> dict[str, Any]:
    program = [sys.executable, "-m", "tests.callers.triton_calls", grpc_address, http_address]
    done = subprocess.run(program, input=pickle.dumps(cases), capture_output=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answers: dict[str, Any] = pickle.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def answers(http_server: HttpServer, cases: dict[str, Case]) -> dict[str, Any]:
    return _call(http_server.process.target, http_server.address, list(cases.values()))


@pytest.fixture(params=_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def answer(way: str, answers: dict[str, Any], cases: dict[str, Case]) -> Callable[[str], Any]:
    """The answer to a case, by its name."""
    return lambda name: answers[way][list(cases).index(name)]


def _texts(array: Any) -> list[str]:
    """JSON has texts where binary tensors have bytes."""
    return [text.decode() if isinstance(text, bytes) else text for text in array.ravel()]


def _is_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, atol=_TOLERANCE)


def test_texts_in_and_labels_out(answer: Callable[[str], Any], ours: Client) -> None:
    given = answer("classify")
    for row, text in enumerate(_TEXTS):
        expected = ours.classify("classifier", text, top_k=2, function=ScoreFunction.SCORE_FUNCTION_SIGMOID)
        assert _texts(given["label"][row]) == [label.label for label in expected]
        _is_close(given["score"][row], [label.score for label in expected])
    image = answer("classify image")
    assert image["label"].shape == image["score"].shape == (1, 3)


def test_vectors(answer: Callable[[str], Any], ours: Client) -> None:
    _is_close(answer("embed")["embedding"], [ours.embed("minilm", text) for text in _TEXTS])
    many = answer("embed many")["embedding"]
    assert many.shape == (_MANY_ROWS, 384)
    _is_close(many[-1], ours.embed("minilm", f"text {_MANY_ROWS - 1}"))
    vectors = answer("extract features")
    for row, text in enumerate(_TEXTS):
        expected = ours.extract_features("extractor", text)
        count = int(vectors["count"][row, 0])
        _is_close(vectors["vectors"][row, :count], expected)
        assert not vectors["vectors"][row, count:].any()


def test_places_in_texts(answer: Callable[[str], Any], ours: Client) -> None:
    given = answer("answer")
    expected = ours.answer("answerer", "Who?", _TEXTS[0], top_k=3)
    assert _texts(given["text"]) == [span.text for span in expected]
    assert given["start"].tolist() == [[span.start for span in expected]]
    entities = answer("find entities")
    for row, text in enumerate(_TEXTS):
        found = ours.find_entities("tagger", text, aggregation=Aggregation.AGGREGATION_SIMPLE)
        assert entities["count"][row, 0] == len(found)
        assert _texts(entities["text"][row, : len(found)]) == [entity.text for entity in found]
        assert entities["end"][row, : len(found)].tolist() == [entity.end for entity in found]


def test_two_axes_of_a_row(answer: Callable[[str], Any], ours: Client) -> None:
    given = answer("fill masks")
    masks = ours.fill_masks("filler", "Ann [MASK] in [MASK].", top_k=3)
    assert given["token_id"].tolist() == [[[token.token_id for token in mask.tokens] for mask in masks]]
    assert given["start"].tolist() == [[mask.start for mask in masks]]


def test_lists_of_texts(answer: Callable[[str], Any], ours: Client) -> None:
    _is_close(answer("compare")["scores"][0], ours.compare("minilm", _TEXTS[0], _TEXTS))
    ranked = answer("rerank")
    assert list(ranked) == ["score", "index"]
    assert ranked["index"].tolist() == [[rank.index for rank in ours.rerank("reranker", "Who?", _TEXTS)]]
    labels = ours.classify_zero_shot("entailer", _TEXTS[0], ["home", "work"], multi_label=True)
    assert _texts(answer("classify zero shot")["label"]) == [label.label for label in labels]


def test_raw_outputs_are_what_scores_are_made_of(answer: Callable[[str], Any], ours: Client, image: bytes) -> None:
    for name in ("raw classifier", "raw classifier, int32"):
        logits = answer(name)["logits"]
        assert logits.shape == (2, 4)
        for row, text in enumerate(_TEXTS):
            scores = sorted(
                label.score
                for label in ours.classify("classifier", text, top_k=4, function=ScoreFunction.SCORE_FUNCTION_NONE)
            )
            _is_close(np.sort(logits[row]), scores)
    scores = sorted(
        top.score for top in ours.classify_image("viewer", image, top_k=3, function=ScoreFunction.SCORE_FUNCTION_NONE)
    )
    _is_close(np.sort(answer("raw image")["logits"][0]), scores)
    assert answer("raw tagger")["logits"].shape == (2, len(_encoded()["input_ids"][0]), 5)


@pytest.mark.parametrize(
    ("case", "codes", "message"),
    [
        ("unknown model", ("NOT_FOUND", "404"), "model 'unknown' is not served"),
        ("wrong input", ("INVALID_ARGUMENT", "400"), "inputs: there is no input 'context', only text, text_pair"),
        ("wrong parameter", ("INVALID_ARGUMENT", "400"), "parameters: there is no parameter 'topk', only top_k"),
        ("wrong row", ("INVALID_ARGUMENT", "400"), "text[1]: is empty"),
        ("id outside of the vocabulary", ("INVALID_ARGUMENT", "400"), "input_ids: ids from 101 to 99999"),
    ],
)
def test_errors_have_their_code_and_name_the_field(
    answer: Callable[[str], Any], way: str, case: str, codes: tuple[str, str], message: str
) -> None:
    code, text = answer(case)
    assert text.startswith(message)
    if way != "grpc, stream":  # errors of a stream are texts
        assert code == codes["http" in way]


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_what_the_server_says(answers: dict[str, Any], door: str) -> None:
    said = answers[f"said over {door}"]
    assert said["live"]
    assert said["ready"]
    assert said["model ready"]
    assert said["server"]["name"] == "neuronpipe"
    (text,) = said["metadata"]["inputs"]
    assert (text["name"], text["datatype"], [int(dim) for dim in text["shape"]]) == ("text", "BYTES", [-1, 1])
    config = said["config"]["config"] if door == "grpc" else said["config"]
    assert config["max_batch_size"] == 256
    assert [tensor["name"] for tensor in config["input"]] == ["input_ids", "attention_mask", "token_type_ids"]
    (statistics,) = said["statistics"]["model_stats"]
    assert int(statistics["inference_count"]) > _MANY_ROWS
    assert int(statistics["execution_count"]) > 0
    assert int(statistics["inference_stats"]["queue"]["count"]) > _MANY_ROWS
    assert {"name": "minilm/raw", "version": "1", "state": "READY"}.items() <= next(
        item for item in (said["index"] if door == "http" else said["index"]["models"]) if item["name"] == "minilm/raw"
    ).items()
    for refused in ("load", "unload"):
        assert "models are loaded as the registry of the repository says" in said[refused][1]
    assert "there is no shared memory" in said["shared memory"][1]
    if door == "grpc":
        assert said["load"][0] == said["shared memory"][0] == "UNIMPLEMENTED"
