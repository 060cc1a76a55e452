"""cli/request.py, core/task_inputs.py: each field of a task has a flag, and flags make the inputs that JSON would."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from neuronpipe.api.v1.tasks_pb2 import Aggregation, FeaturePooling, FeatureType, ScoreFunction, TaskInput, Truncation
from neuronpipe.cli.request import add_input_flags, choose_task, flag, make_inputs, read_fields
from neuronpipe.cli.task_json import read_task_input
from neuronpipe.core.errors import SetupError
from neuronpipe.core.task_inputs import FIELDS, NEEDED

_TASKS: dict[str, Any] = {field.name: field.message_type for field in TaskInput.DESCRIPTOR.fields}
# Of chats, and of prompts that are no text: as JSON.
_OF_CHATS = {"tools", "template_arguments", "continue_final_message", "prompt_token_ids"}
_EMBEDDER = ("sentence_embedding", "sentence_similarity")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_input_flags(parser)
    return parser


def _inputs(*arguments: str, tasks: tuple[str, ...] = tuple(NEEDED)) -> list[TaskInput]:
    fields = read_fields(_parser().parse_args(arguments))
    return make_inputs(choose_task(tasks, fields, "it"), fields)


def _input(*arguments: str, tasks: tuple[str, ...] = tuple(NEEDED)) -> TaskInput:
    [input] = _inputs(*arguments, tasks=tasks)
    return input


def test_every_field_of_every_task_has_a_flag_and_no_flag_is_left_over() -> None:
    assert {*FIELDS} == {field.name for kind in _TASKS.values() for field in _flagged(kind)}


def _flagged(kind: Descriptor) -> list[FieldDescriptor]:
    """The fields that have flags: options in a message of their own have none, nor what goes with messages.

    With --texts, an input of one text becomes several inputs.
    """
    left_out = {*_OF_CHATS, "texts"} if "text" in kind.fields_by_name else {*_OF_CHATS}
    return [field for field in kind.fields if not field.message_type and field.name not in left_out]


def test_it_is_known_of_every_task_what_it_needs() -> None:
    assert NEEDED.keys() == _TASKS.keys()
    for task, needed in NEEDED.items():
        assert {*needed} <= {*_TASKS[task].fields_by_name}


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("function", ScoreFunction.DESCRIPTOR),
        ("truncation", Truncation.DESCRIPTOR),
        ("aggregation", Aggregation.DESCRIPTOR),
        ("pooling", FeaturePooling.DESCRIPTOR),
        ("type", FeatureType.DESCRIPTOR),
    ],
)
def test_a_flag_of_words_has_those_of_its_enum(field: str, kind: Any) -> None:
    [action] = [action for action in _parser()._actions if action.dest == field]
    names = list(kind.values_by_name)
    prefix = names[0].removesuffix("UNSPECIFIED")
    assert action.choices == [name.removeprefix(prefix).lower() for name in names[1:]]


def _value(field: FieldDescriptor) -> list[str]:
    """A value for a field's flag."""
    if field.type == FieldDescriptor.TYPE_BOOL:
        return []
    if field.enum_type:
        return [field.enum_type.values[-1].name.rpartition("_")[2].lower()]
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return ["0.5"]
    return ["7"] if field.type == FieldDescriptor.TYPE_UINT32 else [__file__]


@pytest.mark.parametrize("task", NEEDED)
def test_all_flags_of_a_task_fill_its_input(task: str) -> None:
    arguments = [part for field in _flagged(_TASKS[task]) for part in (flag(field.name), *_value(field))]
    input = getattr(_input(*arguments, tasks=(task,)), task)
    assert [field.name for field, _ in input.ListFields()] == [field.name for field in _flagged(_TASKS[task])]


def test_flags_make_the_input_that_json_would() -> None:
    json = '{"question_answering": {"question": "Who?", "context": "Ann.", "top_k": 2, "allow_no_answer": true}}'
    flags = ("--question", "Who?", "--context", "Ann.", "--top-k", "2", "--allow-no-answer")
    assert _input(*flags) == read_task_input(json)
    json = '{"zero_shot_classification": {"text": "A.", "candidate_labels": ["b", "c"], "multi_label": true}}'
    assert _input("--text", "A.", "--labels", "b", "c", "--multi-label") == read_task_input(json)


def test_entities_are_aggregated_as_by_the_clients_unless_told_otherwise() -> None:
    tasks = ("token_classification",)
    assert _input("--text", "a", tasks=tasks).token_classification.aggregation == Aggregation.AGGREGATION_SIMPLE
    found = _input("--text", "a", "--aggregation", "max", tasks=tasks)
    assert found.token_classification.aggregation == Aggregation.AGGREGATION_MAX


def test_the_task_is_the_first_that_takes_the_flags() -> None:
    assert _input("--text", "a", tasks=_EMBEDDER).WhichOneof("task") == "sentence_embedding"
    assert _input("--source", "a", "--texts", "b", tasks=_EMBEDDER).WhichOneof("task") == "sentence_similarity"
    classifier = ("text_classification", "rerank", "zero_shot_classification")
    assert _input("--text", "a", tasks=classifier).WhichOneof("task") == "text_classification"
    assert _input("--text", "a", "--labels", "b", tasks=classifier).WhichOneof("task") == "zero_shot_classification"
    assert _input("--query", "a", "--texts", "b", tasks=classifier).WhichOneof("task") == "rerank"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--question", "a", "--context", "b"], "--question, --context"),
        (["--text", "a", "--top-k", "1"], "--text, --top-k"),
        (["--source", "a"], "--source"),
        (["--text", "a", "--image", __file__], "--text, --image"),
    ],
)
def test_flags_that_no_task_takes_are_named_with_what_the_tasks_take(arguments: list[str], given: str) -> None:
    with pytest.raises(SetupError) as error:
        _inputs(*arguments, tasks=_EMBEDDER)
    assert str(error.value) == (
        f"it has no task for {given}; "
        "sentence-embedding takes --text [--skip-normalize] [--dimensions] [--token-ids] [--prompt-name] "
        "[--precision] [--max-chunks] [--return-sparse] [--return-multi-vector] [--truncation] [--truncation-tokens]; "
        "sentence-similarity takes --source --texts [--dimensions] [--truncation] [--truncation-tokens]"
    )


def test_tasks_of_a_newer_gateway_are_left_alone() -> None:
    assert _input("--text", "a", tasks=("divination", "fill_mask")).WhichOneof("task") == "fill_mask"
    with pytest.raises(SetupError, match="it has no task for --text; its tasks are divination, augury"):
        _inputs("--text", "a", tasks=("divination", "augury"))


def test_several_texts_are_several_inputs_with_the_same_options() -> None:
    inputs = _inputs("--text", "a", "--texts", "b", "c", "--dimensions", "3", tasks=_EMBEDDER)
    found = [(input.sentence_embedding.text, input.sentence_embedding.dimensions) for input in inputs]
    assert found == [("a", 3), ("b", 3), ("c", 3)]


def test_several_images_are_several_inputs(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    inputs = _inputs("--image", str(tmp_path / "a"), "--image", str(tmp_path / "b"))
    assert [input.image_classification.image for input in inputs] == [b"a", b"b"]


def test_a_text_from_a_file_is_all_of_it_but_the_last_line_break(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("One,\r\ntwo.\n\n".encode("utf-8-sig"))
    assert _input("--text", f"@{tmp_path / 'text'}").text_classification.text == "One,\r\ntwo.\n"


def test_texts_from_a_file_are_its_lines_but_for_blank_ones(tmp_path: Path) -> None:
    (tmp_path / "texts").write_bytes("One,\r\n \n\ntwo.\u2028Three.".encode())
    found = _input("--query", "q", "--texts", "zero", f"@{tmp_path / 'texts'}")
    assert list(found.rerank.texts) == ["zero", "One,", "two.\u2028Three."]


@pytest.mark.parametrize("value", ["-", "@-"])
def test_a_text_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Grüße\n".encode())))
    assert _input("--text", value).text_classification.text == "Grüße"


def test_an_image_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xd8")))
    assert _input("--image", "-").image_classification.image == b"\xff\xd8"


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (None, ["--text", "@{}"], "--text {}: cannot be read: No such file or directory"),
        (None, ["--image", "{}"], "--image {}: cannot be read: No such file or directory"),
        (b"\xff", ["--context", "@{}"], "--context @{}: is not UTF-8"),
        (b"\n \n", ["--labels", "@{}"], "--labels @{}: has no text"),
    ],
)
def test_a_file_at_fault_is_named_with_its_flag(
    tmp_path: Path, content: bytes | None, arguments: list[str], said: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SetupError) as error:
        _inputs(*(argument.format(file) for argument in arguments))
    assert str(error.value) == said.format(file)


@pytest.mark.parametrize("number", ["-1", "1.5", "4294967296", "٣", ""])
def test_a_number_is_a_whole_one_that_the_wire_can_hold(number: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="is not a whole number from 0 to 4294967295"):
        _parser().parse_args([f"--top-k={number}"])
