"""cli/infer.py: what is asked for by flags, and what is printed."""

import json
import sys
from collections.abc import Iterator

import pytest
from google.rpc.status_pb2 import Status

from neuronpipe import cli
from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferResponse, StageTimings
from neuronpipe.api.v1.models_pb2 import Model
from neuronpipe.api.v1.tasks_pb2 import FeatureType, LabelScore, TaskInput, TaskResult
from neuronpipe.cli import infer
from neuronpipe.cli.infer import result_rows
from neuronpipe.core.task_inputs import NEEDED
from tests.unit.client.fake_gateway import FakeGateway, fake_gateway
from tests.unit.task_messages import task_input, task_result

_GOOD, _BAD = LabelScore(label="good", score=0.75), LabelScore(label="bad", score=0.25)
_LABELS = task_result(text_classification={"labels": [_GOOD, _BAD]})


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """It has a classifier, which answers with the same labels always."""
    with fake_gateway() as gateway:
        gateway.models = [Model(name="m", task="text_classification", tasks=["rerank", "text_classification"])]
        gateway.result = _LABELS
        gateway.answering.set()
        yield gateway


def _infer(gateway: FakeGateway, *arguments: str) -> int:
    """The exit code."""
    try:
        cli.main(["infer", "--target", gateway.target, "--model", "m", *arguments])
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def _outcomes(*errors: str) -> list[InferOutcome]:
    """An outcome for each input; "" is none that failed."""
    return [
        InferOutcome(error=Status(code=3, message=error))
        if error
        else InferOutcome(response=InferResponse(model="m", result=_LABELS))
        for error in errors
    ]


def test_the_model_says_which_task_the_flags_are_for(gateway: FakeGateway) -> None:
    assert _infer(gateway, "--text", "a") == 0
    assert _infer(gateway, "--query", "a", "--texts", "b", "c") == 0
    assert [request.input.WhichOneof("task") for request in gateway.requests] == ["text_classification", "rerank"]


def test_a_task_that_is_given_is_not_asked_for(gateway: FakeGateway) -> None:
    gateway.models = []  # GetModel would fail
    assert _infer(gateway, "--text", "a", "--task", "text-classification") == 0


def test_flags_that_the_model_lacks_exit_with_two(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert _infer(gateway, "--question", "a") == 2
    assert capsys.readouterr().err.startswith(
        "neuronpipe: model 'm' has no task for --question; text-classification takes --text [--text-pair]"
    )


def test_an_input_is_needed(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert _infer(gateway, "--output", "json") == 2
    expected = "neuronpipe: no input is given: add --text or another field of the task, or --json\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("flags", [("--text", "a"), ("--task", "rerank")], ids=lambda flags: flags[0])
def test_json_has_all_of_it(gateway: FakeGateway, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]) -> None:
    assert _infer(gateway, "--json", "{}", *flags) == 2
    assert capsys.readouterr().err == f"neuronpipe: --json: not with {flags[0]}; the JSON has all of the input\n"


def test_a_pipe_gets_json_and_a_terminal_a_table(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _infer(gateway, "--text", "a")
    assert json.loads(capsys.readouterr().out)["model"] == "m"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _infer(gateway, "--text", "a")
    assert capsys.readouterr().out.startswith("SCORE   LABEL\n0.7500  good\n0.2500  bad\n")
    _infer(gateway, "--text", "a", "--output", "json")
    assert json.loads(capsys.readouterr().out)["model"] == "m"


def test_a_table_of_one_input_ends_with_stage_times(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.timings = StageTimings(
        total_ns=4_120_000, preprocess_ns=310_000, predict_ns=3_400_000, postprocess_ns=250_000
    )
    _infer(gateway, "--text", "a", "--output", "table")
    expected = "answered in 4.12 ms, pre-process 0.31 ms, prediction 3.40 ms, post-process 0.25 ms"
    assert capsys.readouterr().out.splitlines()[-2:] == ["", expected]


def test_several_inputs_are_one_call_and_their_results_in_their_order(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.outcomes = _outcomes("", "text: is empty", "")
    assert _infer(gateway, "--text", "a", "--text", "", "--text", "c") == 1
    assert [request.input.text_classification.text for request in gateway.requests] == ["a", "", "c"]
    output, errors = capsys.readouterr()
    lines = list(map(json.loads, output.splitlines()))
    expected = ["", "text: is empty", ""]
    assert [line.get("request_id", line.get("error", {}).get("message")) for line in lines] == expected
    assert errors == "neuronpipe: input 2: text: is empty\n"


def test_a_file_of_one_line_has_a_line_of_json_as_one_of_many_has(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.outcomes = _outcomes("")
    assert _infer(gateway, "--texts", "a") == 0
    assert json.loads(capsys.readouterr().out.removesuffix("\n").replace("\n", "no line"))["model"] == "m"
    gateway.outcomes, gateway.requests = _outcomes("text: is empty"), []
    assert _infer(gateway, "--texts", "") == 1
    output, errors = capsys.readouterr()
    assert json.loads(output)["error"]["message"] == "text: is empty"
    assert errors == "neuronpipe: input 1: text: is empty\n"


def test_a_table_of_several_inputs_has_their_numbers(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.outcomes = _outcomes("text: is empty", "")
    assert _infer(gateway, "--texts", "", "b", "--output", "table") == 1
    output, errors = capsys.readouterr()
    assert output == "INPUT  SCORE   LABEL\n2      0.7500  good\n2      0.2500  bad\n"
    assert errors == "neuronpipe: input 1: text: is empty\n"


def test_a_trace_is_of_one_input(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["trace", "--target", gateway.target, "--model", "m", "--texts", "a", "b"])
    assert capsys.readouterr().err == "neuronpipe: a trace is of one input, not of 2\n"


_SPAN = {"score": 0.5, "start": 1, "end": 4}
# Task → a result, and the rows of a table. Only results of several texts name those of their input.
_SCORED = ["SCORE", "LABEL"]
_TABLES: dict[str, tuple[object, list[list[str]]]] = {
    "text_classification": (
        {"labels": [{"label": "good\x1b[31m", "score": -0.5}]},
        [_SCORED, ["-0.5000", "good [31m"]],
    ),
    "zero_shot_classification": ({"labels": [{"label": "a\nb", "score": 1}]}, [_SCORED, ["1.0000", "a b"]]),
    "image_classification": ({"labels": [{"label": "x" * 61, "score": 1}]}, [_SCORED, ["1.0000", "x" * 59 + "…"]]),
    "zero_shot_image_classification": ({"labels": [{"label": "a cat", "score": 0.5}]}, [_SCORED, ["0.5000", "a cat"]]),
    "zero_shot_token_classification": (
        {"entities": [{**_SPAN, "label": "city", "text": "Rome"}]},
        [["SCORE", "LABEL", "START", "END", "TEXT"], ["0.5000", "city", "1", "4", "Rome"]],
    ),
    "image_embedding": ({"embedding": [0.5, -1]}, [["SHAPE", "VECTOR"], ["2", "0.5000 -1.0000"]]),
    "sparse_embedding": (
        {"weights": [{"token_id": 7, "weight": 1.5, "token": "cat"}]},
        [["WEIGHT", "ID", "TOKEN"], ["1.5000", "7", "cat"]],
    ),
    "multi_vector_embedding": (
        {"data": bytes.fromhex("0000803f00000040"), "shape": [1, 2], "type": FeatureType.FEATURE_TYPE_FLOAT32},
        [["SHAPE", "VECTOR"], ["1x2", "1.0000 2.0000"]],
    ),
    "sentence_embedding": ({"embedding": [1, -0.5]}, [["SHAPE", "VECTOR"], ["2", "1.0000 -0.5000"]]),
    "feature_extraction": (
        # Two vectors of four numbers: little-endian int8, which the scales multiply.
        {"data": bytes(range(8)), "shape": [2, 4], "type": "FEATURE_TYPE_INT8", "scales": [1, 0.5]},
        [["SHAPE", "VECTOR"], ["2x4", "0.0000 1.0000 2.0000 3.0000 2.0000 2.5000 …"]],
    ),
    "sentence_similarity": ({"scores": [0.25, 1]}, [["SCORE", "TEXT"], ["0.2500", "a"], ["1.0000", "b"]]),
    "rerank": ({"texts": [{"index": 1, "score": 0.5}]}, [["SCORE", "INDEX", "TEXT"], ["0.5000", "1", "b"]]),
    "question_answering": (
        {"answers": [{**_SPAN, "text": "Ann"}]},
        [["SCORE", "START", "END", "ANSWER"], ["0.5000", "1", "4", "Ann"]],
    ),
    "token_classification": (
        {"entities": [{**_SPAN, "label": "PER", "text": "Ann"}]},
        [["SCORE", "LABEL", "START", "END", "TEXT"], ["0.5000", "PER", "1", "4", "Ann"]],
    ),
    "fill_mask": (
        {"masks": [{"tokens": [{"token": "a", "score": 0.5}]}, {"tokens": [{"token": "b", "score": 1}]}]},
        [["SCORE", "MASK", "TOKEN"], ["0.5000", "1", "a"], ["1.0000", "2", "b"]],
    ),
    "text_generation": ({"sequences": [{"text": " on the\nmat"}]}, [["SCORE", "TEXT"], ["", "on the mat"]]),
    "summarization": ({"sequences": [{"text": "on the\nmat"}]}, [["SCORE", "TEXT"], ["", "on the mat"]]),
    "translation": (
        {"sequences": [{"text": "sur le tapis", "score": -0.5}, {"text": "sur un tapis", "score": -1}]},
        [["SCORE", "TEXT"], ["-0.5000", "sur le tapis"], ["-1.0000", "sur un tapis"]],
    ),
    "tokenization": (
        {
            "tokens": [
                {"token_id": 2, "text": "[CLS]", "is_special": True},
                {"token_id": 7, "text": "Ann", "start": 0, "end": 3},
            ]
        },
        [["ID", "SPECIAL", "START", "END", "TEXT"], ["2", "yes", "0", "0", "[CLS]"], ["7", "", "0", "3", "Ann"]],
    ),
    "detokenization": ({"text": "Ann"}, [["TEXT"], ["Ann"]]),
}


def test_every_shape_of_a_result_is_tried() -> None:
    shapes = [{getattr(TaskResult(), task).DESCRIPTOR.fields[0].name for task in tasks} for tasks in (NEEDED, _TABLES)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("task", _TABLES)
def test_a_result_is_a_table(task: str) -> None:
    result, rows = _TABLES[task]
    input = {"texts": ["a", "b"]} if task in ("sentence_similarity", "rerank") else {}
    assert result_rows([TaskInput(**{task: input})], [TaskResult(**{task: result})]) == rows  # type: ignore[arg-type]


def test_a_result_of_a_new_shape_has_a_column_for_each_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "_TABLES", {})
    labels = [["LABEL", "SCORE"], ["good", "0.7500"], ["bad", "0.2500"]]
    assert result_rows([task_input(text_classification={})], [_LABELS]) == labels
    vector = task_result(sentence_embedding={"embedding": [1, -0.5]})
    found = result_rows([task_input(sentence_embedding={})], [vector])
    assert found == [["EMBEDDING"], ["1.0000"], ["-0.5000"]]
