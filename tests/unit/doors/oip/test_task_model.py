"""A task as a model: what its tensors become, and what its result becomes. Requests come by gRPC, in raw form."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority
from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    EarlyStopping,
    FeaturePooling,
    FeatureType,
    FinishReason,
    LabelScore,
    ScoreFunction,
    TaskInput,
    TaskResult,
    Truncation,
)
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, NeuronpipeError
from neuronpipe.core.task_inputs import NEEDED
from neuronpipe.doors.oip.task_model import TaskModel
from neuronpipe.doors.oip.tensors import TensorSpec
from neuronpipe.tasks import TASKS
from tests.unit.doors.oip.written_stages import Server, asks, outputs_of
from tests.unit.model_specs import image_spec, model_spec
from tests.unit.task_messages import task_input, task_result

_VECTORS = np.arange(8, dtype=np.float32).reshape(2, 4)
_LABELS = [LabelScore(label="b", score=0.75), LabelScore(label="a", score=0.25)]
# task → tensors of one row, parameters, the input that they are, the result, and the outputs of a row.
# One text, of which no log probabilities are asked for.
_NO_LOGPROBS: dict[str, Any] = {"logprobs": [[]], "top_token_ids": [[]], "top_logprobs": [[]]}
_ENDED: dict[str, Any] = {"finish_reason": FinishReason.FINISH_REASON_STOP_STRING, "stop_string": "."}
_WRITTEN: dict[str, Any] = {"text": " it", "token_ids": [7, 6], **_ENDED}
_SAID = {"text": [" it"], "token_ids": [[7, 6]], "finish_reason": [2], "stop_string": ["."], "count": [1]}
_A, _SPACE = {"token_id": 9, "text": "a", "logprob": -0.5}, {"token_id": 7, "text": " ", "logprob": -1.5}
_RIGHT, _LEFT = Truncation.TRUNCATION_RIGHT, Truncation.TRUNCATION_LEFT
_SIGMOID, _STOPS_EARLY = ScoreFunction.SCORE_FUNCTION_SIGMOID, EarlyStopping.EARLY_STOPPING_TRUE
_GUESSES = [{"token": "y", "score": 0.5, "token_id": 7}, {"token": "x", "token_id": 6}]
_SPANS = {"threshold": 0.25, "allow_nested": True, "multi_label": True}
_CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "text_classification": (
        {"text": [["so"]], "text_pair": [["and so"]]},
        {"top_k": 2, "function": "sigmoid", "truncation": "LEFT"},
        {"text": "so", "text_pair": "and so", "top_k": 2, "function": _SIGMOID, "truncation": _LEFT},
        {"labels": _LABELS},
        {"label": ["b", "a"], "score": [0.75, 0.25], "count": [2]},
    ),
    "sparse_embedding": (
        {"text": [["so"]]},
        {"top_k": 2, "prompt_name": "query"},
        {"text": "so", "top_k": 2, "prompt_name": "query"},
        {"weights": [{"token_id": 7, "weight": 1.5, "token": "a"}, {"token_id": 3, "weight": 0.5, "token": "b"}]},
        {"token_id": [7, 3], "weight": [1.5, 0.5], "token": ["a", "b"], "count": [2]},
    ),
    "multi_vector_embedding": (
        {"text": [["so"]]},
        {"is_query": True},
        {"text": "so", "is_query": True},
        {"data": _VECTORS.tobytes(), "shape": [2, 4], "type": FeatureType.FEATURE_TYPE_FLOAT32},
        {"vectors": _VECTORS.tolist(), "count": [2]},
    ),
    "sentence_embedding": (
        {"text": [["so"]]},
        {"dimensions": 3, "skip_normalize": True},
        {"text": "so", "dimensions": 3, "skip_normalize": True},
        {"embedding": [1, 2, 3]},
        {"embedding": [1, 2, 3]},
    ),
    "question_answering": (
        {"question": [["Who?"]], "context": [["Änn ran."]]},
        {"top_k": 1, "allow_no_answer": False},
        {"question": "Who?", "context": "Änn ran.", "top_k": 1},
        {"answers": [{"text": "Änn", "score": 0.5, "start": 0, "end": 3}]},
        {"text": ["Änn"], "score": [0.5], "start": [0], "end": [3], "count": [1]},
    ),
    "token_classification": (
        {"text": [["Ann ran"]], "ignore_labels": [["O", "B-LOC"]]},
        {"aggregation": "simple"},
        {"text": "Ann ran", "ignore_labels": ["O", "B-LOC"], "aggregation": Aggregation.AGGREGATION_SIMPLE},
        {"entities": [{"label": "PER", "score": 0.5, "text": "Ann", "start": 0, "end": 3}]},
        {"label": ["PER"], "score": [0.5], "text": ["Ann"], "start": [0], "end": [3], "count": [1]},
    ),
    "text_generation": (
        {"prompt": [["so"]]},
        {"truncation": "left", "top_logprobs": 2, "early_stopping": True},
        {"prompt": "so", "truncation": _LEFT, "options": {"top_logprobs": 2, "early_stopping": _STOPS_EARLY}},
        {"sequences": [_WRITTEN | {"logprobs": [_SPACE | {"top": [_A, _SPACE]}, {"token_id": 6, "logprob": -2.0}]}]},
        {
            **_SAID,
            "logprobs": [[-1.5, -2.0]],
            "top_token_ids": [[[9, 7], [0, 0]]],
            "top_logprobs": [[[-0.5, -1.5], [0, 0]]],
            "score": [0.0],
        },
    ),
    "summarization": (
        {"text": [["so"]]},
        {"truncation": "left"},
        {"text": "so", "truncation": _LEFT},
        {"sequences": [_WRITTEN | {"score": -0.5}]},
        {**_SAID, "score": [-0.5], **_NO_LOGPROBS},
    ),
    "translation": (
        {"text": [["so"]]},
        {"truncation": "right"},
        {"text": "so", "truncation": _RIGHT},
        {"sequences": [_WRITTEN]},
        {**_SAID, "score": [0.0], **_NO_LOGPROBS},
    ),
    "fill_mask": (
        {"text": [["a [M]"]], "targets": [["x", "y"]]},
        {"top_k": 2},
        {"text": "a [M]", "targets": ["x", "y"], "top_k": 2},
        {"masks": [{"tokens": _GUESSES, "start": 2, "end": 5}]},
        {"token": [["y", "x"]], "score": [[0.5, 0]], "token_id": [[7, 6]], "start": [2], "end": [5], "count": [1]},
    ),
    "feature_extraction": (
        {"text": [["so"]]},
        {"pooling": "none"},
        {"text": "so", "pooling": FeaturePooling.FEATURE_POOLING_NONE},
        {"data": _VECTORS.tobytes(), "shape": [2, 4]},
        {"vectors": _VECTORS.tolist(), "count": [2]},
    ),
    "sentence_similarity": (
        {"source": [["so"]], "texts": [["a", "b"]]},
        {},
        {"source": "so", "texts": ["a", "b"]},
        {"scores": [0.5, -0.5]},
        {"scores": [0.5, -0.5]},
    ),
    "rerank": (
        {"query": [["so"]], "texts": [["a", "b"]]},
        {"top_n": 1},
        {"query": "so", "texts": ["a", "b"], "top_n": 1},
        {"texts": [{"index": 1, "score": 0.5}]},
        {"index": [1], "score": [0.5], "count": [1]},
    ),
    "zero_shot_classification": (
        {"text": [["so"]], "candidate_labels": [["a", "b"]]},
        {"multi_label": True, "hypothesis_template": "It is {}."},
        {"text": "so", "candidate_labels": ["a", "b"], "multi_label": True, "hypothesis_template": "It is {}."},
        {"labels": _LABELS},
        {"label": ["b", "a"], "score": [0.75, 0.25], "count": [2]},
    ),
    "image_classification": (
        {"image": [[b"\xff\xd8\x00"]]},
        {"top_k": 2},
        {"image": b"\xff\xd8\x00", "top_k": 2},
        {"labels": _LABELS},
        {"label": ["b", "a"], "score": [0.75, 0.25], "count": [2]},
    ),
    "image_embedding": (
        {"image": [[b"\xff\xd8\x00"]]},
        {"dimensions": 2},
        {"image": b"\xff\xd8\x00", "dimensions": 2},
        {"embedding": [0.5, 1]},
        {"embedding": [0.5, 1]},
    ),
    "zero_shot_token_classification": (
        {"text": [["Ann sat"]], "candidate_labels": [["a", "b"]]},
        {**_SPANS, "truncation": "right"},
        {"text": "Ann sat", "candidate_labels": ["a", "b"], **_SPANS, "truncation": _RIGHT},
        {"entities": [{"label": "a", "score": 0.5, "text": "Ann", "start": 0, "end": 3}]},
        {"label": ["a"], "score": [0.5], "text": ["Ann"], "start": [0], "end": [3], "count": [1]},
    ),
    "zero_shot_image_classification": (
        {"image": [[b"\xff\xd8\x00"]], "candidate_labels": [["a", "b"]]},
        {"hypothesis_template": "A {}."},
        {"image": b"\xff\xd8\x00", "candidate_labels": ["a", "b"], "hypothesis_template": "A {}."},
        {"labels": _LABELS},
        {"label": ["b", "a"], "score": [0.75, 0.25], "count": [2]},
    ),
}


def _spec(task: str) -> Any:
    return model_spec(task) if TASKS[task].reads == "texts" else image_spec(task)


def _classifier(**changes: Any) -> Server:
    """A label that is the text itself, as often as it is long."""

    def answer(input: TaskInput) -> TaskResult | NeuronpipeError:
        text = input.text_classification.text
        if text == "wrong":
            return InvalidInput("text", "is wrong")
        labels = [LabelScore(label=text, score=1)] * len(text)
        return task_result(text_classification={"labels": labels})

    return Server([model_spec(version=1), model_spec(version=2)], answer, **changes)


def test_every_shape_of_an_input_and_of_a_result_has_a_case() -> None:
    shapes = [
        {
            *(getattr(TaskResult(), task).DESCRIPTOR.fields[0].name for task in tasks),
            *(field for task in tasks for field in NEEDED[task]),
        }
        for tasks in (TASKS, _CASES)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("task", _CASES)
async def test_tensors_become_an_input_and_a_result_tensors(task: str) -> None:
    tensors, parameters, input, result, outputs = _CASES[task]
    server = Server([_spec(task)], lambda given: task_result(**{task: result}))
    response = await server.infer(asks("small", parameters, **tensors))
    assert server.inputs == [task_input(**{task: input})]
    assert outputs_of(response) == {name: [row] for name, row in outputs.items()}


@pytest.mark.parametrize("task", _CASES)
async def test_metadata_is_what_a_response_has(task: str) -> None:
    tensors, _, _, result, _ = _CASES[task]
    server = Server([_spec(task)], lambda given: task_result(**{task: result}))
    described = server.service.model_metadata("small", "")
    assert {input["name"] for input in described["inputs"]} >= set(tensors)
    given = {input.name: (input.datatype, len(input.shape)) for input in asks("small", **tensors).inputs}
    declared = {input["name"]: (input["datatype"], len(input["shape"])) for input in described["inputs"]}
    assert given.items() <= declared.items()
    response = await server.infer(asks("small", **tensors))
    for output, metadata in zip(response.outputs, described["outputs"], strict=True):
        assert (output.name, output.datatype) == (metadata["name"], metadata["datatype"])
        assert len(output.shape) == len(metadata["shape"])
        assert all(dim in (-1, size) for dim, size in zip(metadata["shape"], output.shape, strict=True))


@pytest.mark.parametrize("task", TASKS)
def test_every_field_of_an_input_is_a_tensor_or_a_parameter(task: str) -> None:
    fields = TaskInput.DESCRIPTOR.fields_by_name[task].message_type
    assert fields
    model = TaskModel(task)
    named = {input.name for input in model.inputs} | set(model.parameters)
    assert {field.name for field in fields.fields} - named <= {
        "type",
        "precision",
        "texts",
        "return_multi_vector",
        "return_sparse",
        "token_ids",
        "options",
        "messages",
        "tools",
        "template_arguments",
        "continue_final_message",
        "prompt_token_ids",
        "chunks",
    }  # see task_model.py


async def test_rows_become_requests_and_come_back_in_order() -> None:
    server = _classifier()
    response = await server.infer(asks("small", text=[["a"], ["bb"], [""]]))
    assert [input.text_classification.text for input in server.inputs] == ["a", "bb", ""]
    assert outputs_of(response) == {
        "label": [["a", ""], ["bb", "bb"], ["", ""]],
        "score": [[1, 0], [1, 1], [0, 0]],
        "count": [[1], [2], [0]],
    }


async def test_rows_may_be_a_shape_of_one_dimension() -> None:
    server = _classifier()
    assert outputs_of(await server.infer(asks("small", text=["a", "b"])))["label"] == [["a"], ["b"]]


async def test_no_elements_at_all_are_a_tensor_of_their_shape() -> None:
    response = await _classifier().infer(asks("small", text=[[""]]))
    assert [list(output.shape) for output in response.outputs] == [[1, 0], [1, 0], [1, 1]]
    assert list(response.raw_output_contents) == [b"", b"", bytes(4)]


async def test_vectors_of_tokens_are_filled_up_with_zeros() -> None:
    arrays = [np.ones((1, 2), np.float32), np.full((2, 2), 2, np.float32)]
    results = [task_result(feature_extraction={"data": array.tobytes(), "shape": array.shape}) for array in arrays]
    server = Server([model_spec("feature_extraction")], lambda given: results[int(given.feature_extraction.text)])
    expected = {"vectors": [[[1, 1], [0, 0]], [[2, 2], [2, 2]]], "count": [[1], [2]]}
    assert outputs_of(await server.infer(asks("small", text=[["0"], ["1"]]))) == expected


async def test_one_vector_of_a_text_is_the_only_one_of_its_row() -> None:
    result = task_result(feature_extraction={"data": _VECTORS[0].tobytes(), "shape": [4]})
    server = Server([model_spec("feature_extraction")], lambda given: result)
    response = await server.infer(asks("small", {"pooling": "mean"}, text=[["a"]]))
    assert outputs_of(response)["vectors"] == [[[0, 1, 2, 3]]]


async def test_outputs_come_as_they_are_wanted() -> None:
    request = asks("small", text=[["ab"]])
    request.outputs.add(name="score")
    request.outputs.add(name="label")
    assert list(outputs_of(await _classifier().infer(request))) == ["score", "label"]


async def test_a_response_says_what_it_answers() -> None:
    request = asks("small", text=[["a"]])
    request.id = "mine"
    response = await _classifier().infer(request)
    assert (response.model_name, response.model_version, response.id) == ("small", "2", "mine")
    request.model_version = "1"
    assert (await _classifier().infer(request)).model_version == "1"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, Priority.PRIORITY_UNSPECIFIED),
        (1, Priority.PRIORITY_INTERACTIVE),
        (2, Priority.PRIORITY_BULK),
        (9, Priority.PRIORITY_BULK),
    ],
)
async def test_priority_1_is_interactive_and_all_below_bulk(given: int, expected: int) -> None:
    server = _classifier()
    request = asks("small", text=[["a"]])
    request.parameters["priority"].uint64_param = given  # as tritonclient does
    await server.infer(request)
    assert server.tokenized[0].call.priority == expected


async def test_the_id_and_the_timeout_go_along() -> None:
    server = _classifier()
    request = asks("small", {"timeout": 30_000_000, "triton_enable_empty_final_response": True}, text=[["a"]])
    request.id = "mine"
    await server.infer(request)
    call = server.tokenized[0].call
    assert call.request_id == "mine"
    assert call.remaining_s is not None
    assert 20 < call.remaining_s <= 30


async def test_a_timeout_ends_a_request() -> None:
    with pytest.raises(DeadlineExceeded):
        await _classifier().infer(asks("small", {"timeout": 1}, text=[["a"]]))


async def test_a_request_gets_an_id_where_it_has_none() -> None:
    server = _classifier()
    response = await server.infer(asks("small", text=[["a"]]))
    assert len(server.tokenized[0].call.request_id) == 32
    assert response.id == ""


async def test_the_cache_is_passed_by_where_a_request_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    server, asked = _classifier(), []
    pipeline = server.service._pipeline
    infer = pipeline.infer

    async def keep(request: Any, span: Any) -> Any:
        asked.append(request.cache_control)
        return await infer(request, span)

    monkeypatch.setattr(pipeline, "infer", keep)
    for word in ("bypass", "refresh"):
        await server.infer(asks("small", {"cache_control": word}, text=[["a"]]))
    assert asked == [CacheControl.CACHE_CONTROL_BYPASS, CacheControl.CACHE_CONTROL_REFRESH]


async def test_typed_contents_are_read_as_raw_ones() -> None:
    request = asks("small", text=[["a"], ["b"]])
    del request.raw_input_contents[:]
    request.inputs[0].contents.bytes_contents.extend([b"a", b"b"])
    response = await _classifier().infer(request)
    assert outputs_of(response)["label"] == [["a"], ["b"]]
    assert not any(output.HasField("contents") for output in response.outputs)


def _with(shape: Any = None, raw: Any = None, elements: Sequence[bytes] = (), **changes: Any) -> Any:
    """A request with another shape of its input, other raw contents, typed contents, or other fields of its input."""
    request = asks("small", text=[["a"]])
    if shape is not None:
        request.inputs[0].shape[:] = shape
    if raw is not None:
        request.raw_input_contents[:] = raw
    if elements:
        request.inputs[0].contents.bytes_contents.extend(elements)
    for name, value in changes.items():
        setattr(request.inputs[0], name, value)
    return request


def _with_output(name: str, **parameters: str) -> Any:
    request = asks("small", text=[["a"]])
    output = request.outputs.add(name=name)
    for key, value in parameters.items():
        output.parameters[key].string_param = value
    return request


def _with_input(**parameters: str) -> Any:
    request = asks("small", text=[["a"]])
    for key, value in parameters.items():
        request.inputs[0].parameters[key].string_param = value
    return request


def _empty_parameter() -> Any:
    request = asks("small", text=[["a"]])
    request.parameters["top_k"].SetInParent()
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asks("small"), "text: is missing"),
        (_with(name="txt"), "inputs: there is no input 'txt', only text, text_pair"),
        (_with(name="x" * 999), "inputs: there is no input 'xxx"),
        (asks("small", text=[["a"]], text_pair=[["a"], ["b"]]), "inputs: text has 1 rows, text_pair has 2 rows"),
        (_with(datatype="FP32"), "text: its datatype must be BYTES"),
        (_with(shape=[1, 2]), "text: its shape must be [rows, 1]"),
        (_with(shape=[]), "text: its shape must be [rows, 1]"),
        (_with(shape=[1, 1, 1]), "text: its shape must be [rows, 1]"),
        (_with(shape=[-1, 1]), "text: -1 rows, must be 1 to 256"),
        (_with(shape=[0, 1]), "text: 0 rows, must be 1 to 256"),
        (_with(shape=[1 << 62, 1]), "text: 4611686018427387904 rows, must be 1 to 256"),
        (_with(shape=[2, 1]), "text: its 5 bytes end within element 1 of 2"),
        (_with(raw=[b""]), "text: its 0 bytes end within element 0 of 1"),
        (_with(raw=[b"\1\0\0"]), "text: its 3 bytes end within element 0 of 1"),
        (_with(raw=[b"\xff\xff\xff\xffa"]), "text: its 5 bytes end within element 0 of 1"),
        (_with(raw=[b"\1\0\0\0abc"]), "text: 7 bytes, its 1 elements take 5"),
        (_with(raw=[b"\1\0\0\0\xff"]), "text: is not UTF-8"),
        (_with(raw=[b"a", b"b"]), "raw_input_contents: 2 entries, there are 1 inputs"),
        (_with(elements=[b"a"]), "raw_input_contents: input 'text' also has contents"),
        (_with(raw=[]), "text: 0 elements, its shape takes 1"),
        (_with(raw=[], elements=[b"a", b"b"]), "text: 2 elements, its shape takes 1"),
        (
            _with_input(content_typ="str"),
            "inputs[0].parameters: there is no parameter 'content_typ', only binary_data_size, content_type",
        ),
        (_with_input(content_type="base64"), "inputs[0].parameters.content_type: 'base64', must be str or np"),
        (
            _with_output("label", binary="yes"),
            "outputs[0].parameters: there is no parameter 'binary', only binary_data, content_type",
        ),
        (_with_input(shared_memory_region="r"), "inputs: there is no shared memory: send tensors in the request"),
        (_with_output("labels"), "outputs: there is no output 'labels', only label, score, count"),
        (
            _with_output("label", classification="2"),
            "outputs: shared_memory_region and classification are not supported",
        ),
        (
            asks("small", {"topk": 1}, text=[["a"]]),
            "parameters: there is no parameter 'topk', only top_k, function, truncation, truncation_tokens, "
            "priority, timeout, cache_control",
        ),
        (asks("small", {"top_k": "1"}, text=[["a"]]), "top_k: '1', must be a whole number"),
        (asks("small", {"top_k": True}, text=[["a"]]), "top_k: True, must be a whole number"),
        (asks("small", {"top_k": float("nan")}, text=[["a"]]), "top_k: nan, must be a whole number"),
        (asks("small", {"top_k": -1}, text=[["a"]]), "top_k: -1, must be a whole number"),
        (asks("small", {"top_k": 1 << 40}, text=[["a"]]), "top_k: 1099511627776, must be a whole number"),
        (asks("small", {"truncation": "up"}, text=[["a"]]), "truncation: 'up', must be error or right or left"),
        (asks("small", {"truncation": 2}, text=[["a"]]), "truncation: 2, must be error or right or left"),
        (asks("small", {"priority": -1}, text=[["a"]]), "priority: -1, must be a whole number from 0 on"),
        (asks("small", {"timeout": float("nan")}, text=[["a"]]), "timeout: nan, must be a whole number from 0 on"),
        (asks("small", {"cache_control": "never"}, text=[["a"]]), "cache_control: 'never', must be bypass or refresh"),
        (
            asks("small", {"sequence_id": 7}, text=[["a"]]),
            "sequence_id: there are no sequences: requests do not depend on each other",
        ),
        (_empty_parameter(), "parameters: 'top_k' has no value"),
        (asks("small", text=[["a"], ["wrong"]]), "text[1]: is wrong"),
        (asks("small", text=[["wrong"]]), "text: is wrong"),
    ],
    ids=str,
)
async def test_a_request_that_is_at_fault_says_where(request_: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        await _classifier().infer(request_)
    assert error.value.message.startswith(message)
    assert len(error.value.message) < 300


async def test_parameters_of_other_servers_clients_that_change_nothing_are_taken() -> None:
    request = _with_output("label", content_type="str", triton_x="1")
    for name in ("content_type", "triton_x"):
        request.inputs[0].parameters[name].string_param = "str"
    request.inputs[0].parameters["binary_data_size"].int64_param = 5
    request.outputs[0].parameters["binary_data"].bool_param = True
    assert [output.name for output in (await _classifier().infer(request)).outputs] == ["label"]


async def test_there_is_a_limit_to_what_is_read_one_by_one() -> None:
    for name in ("inputs", "outputs"):
        request = asks("small", text=[["a"]])
        getattr(request, name).extend([getattr(request, name).add() for _ in range(65)])
        with pytest.raises(InvalidInput, match=f"{name}: 1[0-9]+ of them, the limit is 64"):
            await _classifier().infer(request)
    with pytest.raises(InvalidInput, match="parameters: 65 of them, the limit is 64"):
        await _classifier().infer(asks("small", {f"p{number}": 1 for number in range(65)}, text=[["a"]]))


async def test_an_input_twice_is_an_error() -> None:
    request = asks("small", text=[["a"]])
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])
    with pytest.raises(InvalidInput, match="text: is given twice"):
        await _classifier().infer(request)


async def test_lists_of_texts_have_a_limit() -> None:
    request = asks("small", query=[["a"]], texts=[["a"] * 1025])
    with pytest.raises(InvalidInput, match="texts: 1025 elements in a row, the limit is 1024"):
        await Server([model_spec("rerank")]).infer(request)


async def test_too_many_rows_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="text: 3 rows, must be 1 to 2"):
        await _classifier(max_batch_items=2).infer(asks("small", text=[["a"]] * 3))


async def test_results_that_are_too_large_together_are_an_error() -> None:
    with pytest.raises(InvalidInput, match="the results are too large for one response, the limit is 1024 bytes"):
        await _classifier(max_batch_response_bytes=1024).infer(asks("small", text=[["a" * 200]] * 2))


async def test_one_long_row_does_not_make_many_short_ones_large() -> None:
    rows = [["a" * 100], *([["a"]] * 99)]  # together 199 labels, and with padding 10,000 of 64 bytes
    with pytest.raises(InvalidInput, match=r"label: about 640000 bytes in the shape \[100, 100\], the limit is 500000"):
        await _classifier(max_batch_response_bytes=500_000).infer(asks("small", text=rows))
    assert await _classifier(max_batch_response_bytes=700_000).infer(asks("small", text=rows))


@pytest.mark.parametrize(("name", "version"), [("large", ""), ("small", "3"), ("small/rerank", ""), ("", "")])
async def test_a_model_that_is_not_there_is_not_found(name: str, version: str) -> None:
    request = asks(name, text=[["a"]])
    request.model_version = version
    with pytest.raises(ModelNotFound):
        await _classifier().infer(request)


async def test_a_version_that_is_no_number_is_an_error() -> None:
    request = asks("small", text=[["a"]])
    request.model_version = "newest"
    with pytest.raises(InvalidInput, match="version"):
        await _classifier().infer(request)


async def test_other_tasks_of_a_model_have_names_of_their_own() -> None:
    result = task_result(sentence_similarity={"scores": [0.5]})
    server = Server([model_spec("sentence_embedding", also_answers=("sentence_similarity",))], lambda given: result)
    response = await server.infer(asks("small/sentence_similarity", source=[["a"]], texts=[["b"]]))
    assert outputs_of(response) == {"scores": [[0.5]]}
    assert response.model_name == "small/sentence_similarity"


def test_the_table_of_docs_oip_is_what_the_models_declare() -> None:
    page = (Path(__file__).parents[4] / "docs" / "oip.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z_]+) \| (`.*) \|$", page, re.MULTILINE))

    def shown(spec: TensorSpec) -> str:
        axes = [dim for dim in spec.dims if dim == -1]
        return f"`{spec.name}`" + (f" [{', '.join('n' * len(axes))}]" if axes else "") + "?" * spec.is_optional

    expected = {}
    for task in TASKS:
        model = TaskModel(task)
        parameters = [f"`{name}`" for name in model.parameters]
        cells = [[shown(input) for input in model.inputs], [shown(output) for output in model.outputs], parameters]
        expected[task] = " | ".join(", ".join(cell) for cell in cells)
    assert rows == expected
