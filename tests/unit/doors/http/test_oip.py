"""doors/http/oip.py: JSON and binary tensors. What tensors mean is tested in tests/unit/gateway/oip."""

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from neuronpipe.api.v1.tasks_pb2 import LabelScore, TaskInput, TaskResult
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.doors.http.problems import CODES
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.every_error import EVERY_ERROR
from tests.unit.model_specs import image_spec, model_spec
from tests.unit.task_messages import task_result

_VECTOR = [0.5, 1.5, -2.0, 0.0]
_BINARY = "application/octet-stream"
_IMAGE: dict[str, Any] = {"name": "image", "shape": [1], "datatype": "BYTES"}
_SPECS = [model_spec(), model_spec("sentence_embedding", name="vectors"), image_spec(name="viewer")]


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    match input.WhichOneof("task"):
        case "sentence_embedding":
            return task_result(sentence_embedding={"embedding": _VECTOR})
        case "image_classification":
            label = LabelScore(label=str(len(input.image_classification.image)), score=1)
            return task_result(image_classification={"labels": [label]})
    text = input.text_classification.text
    if text.isdigit():
        return EVERY_ERROR[int(text)]
    return task_result(text_classification={"labels": [{"label": text, "score": 1}]})


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


def _text(*texts: str, **changes: Any) -> dict[str, Any]:
    return {"name": "text", "shape": [len(texts), 1], "datatype": "BYTES", "data": list(texts)} | changes


def _raw(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


async def _post_binary(browser: Browser, path: str, head: Any, *tensors: bytes, **headers: str) -> tuple[int, Any]:
    data = orjson.dumps(head)
    fields = {"inference-header-content-length": str(len(data))} | headers
    return await browser.post(path, b"".join((data, *tensors)), _BINARY, **fields)


async def test_json_in_and_out(browser: Browser) -> None:
    body = {"id": "mine", "inputs": [_text("a", "b")], "parameters": {"top_k": 1}}
    status, answer = await browser.post("/v2/models/small/infer", body)
    assert status == 200
    assert answer == {
        "model_name": "small",
        "model_version": "1",
        "id": "mine",
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [2, 1], "data": ["a", "b"]},
            {"name": "score", "datatype": "FP64", "shape": [2, 1], "data": [1.0, 1.0]},
            {"name": "count", "datatype": "UINT32", "shape": [2, 1], "data": [1, 1]},
        ],
    }
    assert [input.text_classification.top_k for input in browser.inputs] == [1, 1]


@pytest.mark.parametrize("data", [["a", "b"], [["a"], ["b"]]])
async def test_data_is_flat_or_in_lists_of_lists(browser: Browser, data: list[Any]) -> None:
    status, _ = await browser.post("/v2/models/small/infer", {"inputs": [_text("a", "b", data=data)]})
    assert status == 200
    assert [input.text_classification.text for input in browser.inputs] == ["a", "b"]


@pytest.mark.parametrize(
    "path",
    ["/v2/models/small", "/v2/models/small/versions/1", "/v2/models/small/raw", "/v2/models/small/raw/versions/1"],
)
async def test_a_model_has_its_paths_with_and_without_a_version(browser: Browser, path: str) -> None:
    name = "small/raw" if "raw" in path else "small"
    for end in ("", "/config", "/ready", "/stats"):
        status, body = await browser.get(path + end)
        assert status == 200
        if end in ("", "/config"):
            assert body["name"] == name
        if end == "/ready":
            assert body == {"name": name, "ready": True}
        if end == "/stats":
            assert [(stat["name"], stat["version"]) for stat in body["model_stats"]] == [(name, "1")]


async def test_readiness_of_an_unknown_model_or_version_is_not_found_as_in_triton(browser: Browser) -> None:
    # TRITONSERVER_ServerModelIsReady of triton-inference-server/core returns the error of its look-up.
    for path in ("unknown", "unknown/versions/1", "small/versions/7"):
        assert (await browser.get(f"/v2/models/{path}/ready"))[0] == 404


async def test_the_server_and_the_index(browser: Browser) -> None:
    assert (await browser.get("/v2"))[1]["name"] == "neuronpipe"
    status, index = await browser.post("/v2/repository/index", b"")
    assert (status, index[0]) == (200, {"name": "small", "version": "1", "state": "READY", "reason": ""})
    assert await browser.post("/v2/repository/index", b'{"ready": true}') == (200, index)
    status, body = await browser.post("/v2/repository/index", b'{"ready": 1}')
    assert (status, body["error"]) == (400, "ready: must be true or false")
    _, statistics = await browser.get("/v2/models/stats")
    assert [stat["name"] for stat in statistics["model_stats"]] == ["small", "vectors", "viewer"]


async def test_binary_tensors_in_and_out(browser: Browser) -> None:
    head = {
        "inputs": [
            {"name": "text", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
            {"name": "text_pair", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
        ],
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "count", "parameters": {"binary_data": False}}, {"name": "label"}],
    }
    status, body = await _post_binary(browser, "/v2/models/small/infer", head, _raw(b"ab"), _raw(b"c"))
    assert status == 200
    expected = [("ab", "c")]
    assert [
        (input.text_classification.text, input.text_classification.text_pair) for input in browser.inputs
    ] == expected
    assert browser.headers["content-type"] == _BINARY
    length = int(browser.headers["inference-header-content-length"])
    assert orjson.loads(body[:length])["outputs"] == [
        {"name": "count", "datatype": "UINT32", "shape": [1, 1], "data": [1]},
        {"name": "label", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 6}},
    ]
    assert body[length:] == _raw(b"ab")


async def test_vectors_are_binary_where_an_output_asks_for_it(browser: Browser) -> None:
    outputs = [{"name": "embedding", "parameters": {"binary_data": True}}]
    _, body = await browser.post("/v2/models/vectors/infer", {"inputs": [_text("a")], "outputs": outputs})
    length = int(browser.headers["inference-header-content-length"])
    assert np.frombuffer(body[length:], "<f4").tolist() == _VECTOR
    _, body = await browser.post("/v2/models/vectors/infer", {"inputs": [_text("a")]})
    assert body["outputs"][0]["data"] == _VECTOR
    assert "id" not in body
    assert "inference-header-content-length" not in browser.headers


async def test_images_are_binary_or_in_base64(browser: Browser) -> None:
    encoded = base64.b64encode(b"\xff\xd8\xff").decode()
    given = _IMAGE | {"data": [encoded], "parameters": {"content_type": "base64"}}
    status, body = await browser.post("/v2/models/viewer/infer", {"inputs": [given]})
    assert (status, body["outputs"][0]["data"]) == (200, ["3"])
    given = _IMAGE | {"parameters": {"binary_data_size": 7}}
    status, body = await _post_binary(browser, "/v2/models/viewer/infer", {"inputs": [given]}, _raw(b"\xff\xd8\xff"))
    assert (status, body["outputs"][0]["data"]) == (200, ["3"])


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_every_error_has_the_protocol_s_form(browser: Browser, error: NeuronpipeError) -> None:
    body = {"inputs": [_text(str(EVERY_ERROR.index(error)))]}
    assert await browser.post("/v2/models/small/infer", body) == (CODES[type(error)].status, {"error": error.message})


_IDS = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64"}

_A = [_text("a")]


def _with(**parameters: Any) -> dict[str, Any]:
    return {"inputs": [_text("a", parameters=parameters)]}


def _ids(**changes: Any) -> dict[str, Any]:
    return {"inputs": [_IDS | changes]}


# For a classifier of texts.
_AT_FAULT: list[tuple[Any, str]] = [
    (b"{", "body: is no valid JSON in UTF-8: line 1, column 2"),
    (b'{"inputs": [], "parameters": {"top_k": NaN}}', "body: is no valid JSON in UTF-8: line 1, column 40"),
    ({}, "inputs: is missing"),
    ({"inputs": {}}, "inputs: must be a list"),
    ({"inputs": []}, "text: is missing"),
    ({"inputs": _A * 65}, "inputs: has more than 64 elements"),
    ({"inputs": _A, "outputs": [{"name": "label"}] * 65}, "outputs: has more than 64 elements"),
    (
        {"inputs": _A, "parameters": {f"p{number}": 1 for number in range(65)}},
        "parameters: has more than 64 elements",
    ),
    ({"inputs": [_text("a") | {"shape": "1"}]}, "inputs[0].shape: must be a list"),
    ({"inputs": [_text("a", shape=[1.5])]}, "inputs[0].shape[0]: must be a whole number"),
    (b'{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1%s]}]}' % (b"0" * 40), "inputs[0].shape[0]: "),
    ({"inputs": [_text("a", shape=[1 << 63, 1])]}, "text: 9223372036854775808 rows, must be 1 to 256"),
    ({"inputs": [_text("a", data=None)]}, "inputs[0]: has neither data nor parameters.binary_data_size"),
    ({"inputs": [_text("a", data=[1])]}, "text: has elements that are not strings"),
    ({"inputs": [_text("a", data=[["a"], "b"])]}, "text: its lists have different depths"),
    ({"inputs": [_text("a", data=["a", "b"])]}, "text: 2 elements, its shape takes 1"),
    ({"inputs": _A, "parameters": {"top_k": []}}, "parameters.top_k: "),
    ({"inputs": _A, "parameters": {"top_k": 1.5}}, "top_k: 1.5, must be a whole number"),
    ({"inputs": _A, "outputs": [{"name": "x"}]}, "outputs: there is no output 'x', only label"),
    (
        {"inputs": [_text("a", parameters={"binary_data_size": 5}, data=None)]},
        "inputs[0].parameters.binary_data_size: must be a number of bytes, 0 are left",
    ),
    (_with(binary_data_size=0), "inputs[0]: has both data and parameters.binary_data_size"),
    (_with(shared_memory_region="r"), "inputs[0].parameters: shared memory is not supported"),
    (
        {"inputs": _A, "outputs": [{"name": "label", "parameters": {"classification": 2}}]},
        "outputs: shared_memory_region and classification are not supported",
    ),
    (
        _with(content_typ="base64"),
        "inputs[0].parameters: there is no parameter 'content_typ', only binary_data_size, content_type",
    ),
    (_with(content_type="hex"), "inputs[0].parameters.content_type: 'hex', must be str or np or base64"),
    (
        {"inputs": _A, "outputs": [{"name": "label"}, {"name": "score", "parameters": {"binary": True}}]},
        "outputs[1].parameters: there is no parameter 'binary', only binary_data, content_type",
    ),
    (
        {"inputs": [_text("a")], "outputs": [{"name": "label", "parameters": {"binary_data": "false"}}]},
        "outputs[0].parameters.binary_data: 'false', must be true or false",
    ),
    (
        {"inputs": [_text("a")], "parameters": {"binary_data_output": 0}},
        "parameters.binary_data_output: 0, must be true or false",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        *(("small", body, message) for body, message in _AT_FAULT),
        (
            "viewer",
            {"inputs": [_IMAGE | {"data": ["?"], "parameters": {"content_type": "base64"}}]},
            "inputs[0].data: is no list of texts in Base64",
        ),
        ("small/raw", _ids(data=[1.0, 2]), "input_ids: has elements that are not INT64"),
        ("small/raw", _ids(data=[True, False]), "input_ids: has elements that are not INT64"),
        ("small/raw", _ids(data=["1", "2"]), "input_ids: has elements that are not INT64"),
        ("small/raw", _ids(data=[{}, None]), "input_ids: has elements that are not INT64"),
        ("small/raw", _ids(data=[1, 1 << 63]), "input_ids: has elements that are not INT64"),
        ("small/raw", _ids(data=[[1, 2], [3]]), "input_ids: its lists have different lengths"),
        ("small/raw", _ids(data=[[1], [2]]), "input_ids: its lists have the shape [2, 1], not that"),
        ("small/raw", _ids(datatype="INT32", data=[1, 1 << 31]), "input_ids: has elements that are not INT32"),
    ],
    ids=str,
)
async def test_a_body_that_is_at_fault_says_where(browser: Browser, path: str, body: Any, message: str) -> None:
    status, answer = await browser.post(f"/v2/models/{path}/infer", body)
    assert status == 400
    assert answer["error"].startswith(message)


@pytest.mark.parametrize("length", ["-1", "1e1", "99999", "x", "9" * 40])
async def test_a_wrong_length_of_the_head_is_an_error(browser: Browser, length: str) -> None:
    head = {"inputs": [_text("a")]}
    status, body = await _post_binary(
        browser, "/v2/models/small/infer", head, **{"inference-header-content-length": length}
    )
    assert status == 400
    assert body["error"].startswith("inference-header-content-length: must be a number of bytes, at most ")


async def test_a_head_that_ends_too_early_is_no_json(browser: Browser) -> None:
    status, body = await _post_binary(
        browser, "/v2/models/small/infer", {"inputs": [_text("a")]}, **{"inference-header-content-length": "5"}
    )
    assert (status, body["error"][:4]) == (400, "body")


async def test_binary_without_the_length_of_the_head_is_an_error(browser: Browser) -> None:
    status, body = await browser.post("/v2/models/small/infer", b"raw", _BINARY)
    assert status == 400
    assert body["error"].startswith("inference-header-content-length: is missing")


@pytest.mark.parametrize(
    ("size", "message"),
    [(99, "inputs[0].parameters"), (3, "body: 2 bytes more"), (-1, "inputs[0]"), (True, "inputs[0]")],
)
async def test_sizes_of_tensors_must_fill_the_body(browser: Browser, size: int, message: str) -> None:
    given = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    status, body = await _post_binary(browser, "/v2/models/small/infer", {"inputs": [given]}, _raw(b"a"))
    assert status == 400
    assert body["error"].startswith(message)


@pytest.mark.parametrize(
    "path", ["/v2/models/large/infer", "/v2/models/small/versions/7/infer", "/v2/models/small/other/infer"]
)
async def test_a_model_that_is_not_there_is_not_found(browser: Browser, path: str) -> None:
    status, body = await browser.post(path, {"inputs": [_text("a")]})
    assert status == 404
    assert set(body) == {"error"}


async def test_an_enormous_body_is_refused() -> None:
    browser = Browser(_SPECS, _answer, max_body_bytes=100)
    status, body = await browser.post("/v2/models/small/infer", {"inputs": [_text("a" * 200)]})
    assert (status, set(body)) == (413, {"error"})


@pytest.mark.parametrize("path", ["/v2/repository/models/small/load", "/v2/repository/models/small/raw/unload"])
async def test_models_are_not_loaded_while_the_server_runs(browser: Browser, path: str) -> None:
    status, body = await browser.post(path, b"")
    assert (status, body["error"]) == (
        501,
        "models are loaded as the registry of the repository says: use `neuronpipe registry`, or start the gateway "
        "with --model-control",
    )


@pytest.mark.parametrize("name", ["org/alias", "org/alias/raw"])
async def test_an_alias_with_a_slash_is_a_models_name(name: str) -> None:
    browser = Browser(_SPECS, _answer, model_aliases="org/alias=vectors")
    served = name.replace("org/alias", "vectors")
    for path in (f"/v2/models/{name}", f"/v2/models/{name}/versions/1"):
        status, body = await browser.get(path)
        assert (status, body["name"]) == (200, served)
        assert (await browser.get(f"{path}/ready"))[0] == 200
        assert (await browser.get(f"{path}/config"))[1]["name"] == served


async def test_a_parameter_that_is_null_is_not_given(browser: Browser) -> None:
    given = {"parameters": {"binary_data_output": None}, "outputs": None, "id": None}
    assert (await browser.post("/v2/models/small/infer", {"inputs": [_text("a")]} | given))[0] == 200
