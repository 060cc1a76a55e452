"""doors/http/sagemaker.py."""

from codecs import BOM_UTF8

import orjson
import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TaskInput, TaskResult
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded, Unauthenticated, Unavailable
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_input, task_result


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    """Each text is its own label."""
    text = input.text_classification.text
    return (
        task_result(text_classification={"labels": [{"label": text, "score": 0.5}]})
        if text
        else InvalidInput("text", "is empty")
    )


def _labels(text: str) -> list[dict[str, object]]:
    return [{"label": text, "score": 0.5}]


@pytest.fixture
def browser() -> Browser:
    return Browser([model_spec()], _answer)


async def test_json_is_hugging_faces(browser: Browser) -> None:
    assert await browser.post("/invocations", {"inputs": "a"}) == (200, [_labels("a")])


async def test_rows_of_csv_have_a_list_of_answers(browser: Browser) -> None:
    body = b'inputs\r\n"a, with a ""quote"""\r\nb\r\n'
    found = await browser.post("/invocations", body, "text/csv; header=present")
    assert found == (200, [_labels('a, with a "quote"'), _labels("b")])


async def test_a_long_text_of_csv_is_a_text_as_any_other(browser: Browser) -> None:
    text = "word " * 40_000  # more than the 128 KiB that the module csv takes by default
    assert await browser.post("/invocations", f'inputs\n"{text}"\n'.encode(), "text/csv") == (200, [_labels(text)])


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        (b"inputs\na\n", "text/csv"),
        (b'{"inputs": "a"}\n', "application/jsonlines"),
        (b'{"inputs": ["a"]}', "application/json"),
    ],
)
async def test_a_byte_order_mark_is_no_part_of_a_body(browser: Browser, body: bytes, media_type: str) -> None:
    assert (await browser.post("/invocations", BOM_UTF8 + body, media_type))[0] == 200
    assert [input.text_classification.text for input in browser.inputs] == ["a"]


async def test_parameters_of_lines_that_are_null_are_none(browser: Browser) -> None:
    lines = b'{"inputs": "a"}\n{"inputs": "b", "parameters": null}\n'
    assert (await browser.post("/invocations", lines, "application/jsonlines"))[0] == 200


async def test_columns_of_csv_are_the_fields_of_an_input() -> None:
    browser = Browser([model_spec("question_answering")], _answer)
    await browser.post("/invocations", b"question,context\nq,c\n", "text/csv")
    assert browser.inputs == [task_input(question_answering={"question": "q", "context": "c"})]


@pytest.mark.parametrize("media_type", ["application/jsonlines", "application/x-ndjson"])
async def test_a_line_of_json_has_a_line_for_an_answer(browser: Browser, media_type: str) -> None:
    status, answer = await browser.post("/invocations", b'{"inputs": "a"}\n\n{"inputs": "b"}\n', media_type)
    assert status == 200
    assert [orjson.loads(line) for line in answer.splitlines()] == [_labels("a"), _labels("b")]
    assert browser.headers["content-type"] == "application/jsonlines"


async def test_answers_to_csv_are_lines_where_those_are_accepted(browser: Browser) -> None:
    _, answer = await browser.post("/invocations", b"inputs\na\nb\n", "text/csv", accept="application/jsonlines")
    assert [orjson.loads(line) for line in answer.splitlines()] == [_labels("a"), _labels("b")]


_CSV, _LINES = "text/csv", "application/jsonlines"


@pytest.mark.parametrize(
    ("body", "media_type", "error"),
    [
        (b"inputs\na,b\n", _CSV, "inputs[0]: has another number of columns than the heading"),
        (b"inputs,x\na\n", _CSV, "inputs[0]: has another number of columns than the heading"),
        (b"inputs,inputs\na,b\n", _CSV, "body: its heading has the column `inputs` twice"),
        (b"inputs,inputs\n", _CSV, "body: its heading has the column `inputs` twice"),
        (b"a,%s,b,%s\nc,d,e,f\n" % (2 * (b"x" * 999,)), _CSV, f"body: its heading has the column `{'x' * 200}` twice"),
        (b'inputs\n"a\n', _CSV, "body: is no valid CSV"),
        (b"\xff", _CSV, "body: is no UTF-8"),
        (b"", _CSV, "inputs: 0 inputs, must be from 1 to 2048"),
        (b'inputs\na\n""\n', _CSV, "inputs[1]: is empty"),
        (b'{"inputs": "a"}\n{"inputs"', _LINES, "line 2: is no valid JSON in UTF-8"),
        (b'{"inputs": "a"}\n3', _LINES, "line 2: must be an object with `inputs`"),
        (b"\n" + b"[" * 129 + b"]" * 129, _LINES, "line 2: lists and objects are nested more than 128 deep, the limit"),
        (
            b'{"inputs": "a"}\n{"inputs": "b", "parameters": {}}',
            _LINES,
            "line 2: has other parameters than the first line",
        ),
    ],
)
async def test_what_is_wrong_is_named(browser: Browser, body: bytes, media_type: str, error: str) -> None:
    assert await browser.post("/invocations", body, media_type) == (400, {"error": error, "error_type": "Validation"})


async def test_the_target_model_of_an_endpoint_of_many_is_in_a_header() -> None:
    browser = Browser([model_spec(), model_spec(name="other")], _answer)
    await browser.post("/invocations", {"inputs": "a"}, x_amzn_sagemaker_target_model="other")
    assert browser.pipeline.asked[0].model == "other"


async def test_clients_of_sagemaker_name_the_model_as_the_endpoint() -> None:
    browser = Browser([model_spec(), model_spec(name="other")], _answer)
    assert await browser.post("/endpoints/other/invocations", {"inputs": "a"}) == (200, [_labels("a")])
    assert browser.pipeline.asked[0].model == "other"


@pytest.mark.parametrize(
    ("body", "media_type"),
    [(b"inputs\n" + b"a\n" * 9, "text/csv"), (b'{"inputs": "a"}\n' * 9, "application/jsonlines")],
)
async def test_of_too_many_inputs_only_one_too_many_is_read(body: bytes, media_type: str) -> None:
    browser = Browser([model_spec()], _answer, max_http_inputs=3)
    _, answer = await browser.post("/invocations", body, media_type)
    assert answer["error"] == "inputs: 4 inputs, must be from 1 to 3"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"," * 100 + b"\n", "body: its heading has 101 columns, at most 64"),
        (b"," * (1 << 20), "body: holds too many values"),
        (b"inputs\n" + b"\n" * (1 << 19), "body: holds too many values"),
    ],
    ids=["columns", "more columns", "lines"],
)
async def test_columns_and_lines_of_csv_are_counted_before_reading(browser: Browser, body: bytes, problem: str) -> None:
    status, answer = await browser.post("/invocations", body, "text/csv")
    assert (status, answer["error"][: len(problem)]) == (400, problem)


async def test_empty_lines_of_json_are_counted() -> None:
    browser = Browser([model_spec()], _answer)
    status, answer = await browser.post("/invocations", b"\n" * (1 << 19), "application/jsonlines")
    assert (status, "too many values" in answer["error"]) == (400, True)


_MESSAGE = InferRequest(model="small", input=task_input(text_classification={"text": "full"}))
_FULL = Overloaded("7 requests in flight, the limit is 7", 1.25)


@pytest.mark.parametrize("path", ["/invocations", "/endpoints/small/invocations"])
@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        (b'{"inputs": "full"}', "application/json"),
        (b'{"inputs": ["a", "full"]}', "application/json"),
        (b"inputs\na\nfull\n", "text/csv"),
        (b'{"inputs": "a"}\n{"inputs": "full"}\n', "application/jsonlines"),
        (_MESSAGE.SerializeToString(), "application/x-protobuf"),
    ],
    ids=["one", "several", "CSV", "lines", "protobuf"],
)
@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (_FULL, 429, "Overloaded", {"retry-after": "2", "retry-after-ms": "1250"}),
        (Unauthenticated("no valid API key came with the call"), 401, "Unauthorized", {"www-authenticate": "Bearer"}),
        (Unavailable("the tokenizer is gone"), 503, "Unhealthy", {"retry-after": "1", "retry-after-ms": "1000"}),
    ],
    ids=["429", "401", "503"],
)
async def test_an_error_that_is_not_the_inputs_fails_the_invocation_and_tells_when_to_come_again(
    error: NeuronpipeError, status: int, kind: str, headers: dict[str, str], body: bytes, media_type: str, path: str
) -> None:
    browser = Browser([model_spec()], lambda given: error if "full" in str(given) else _answer(given))
    found, answer = await browser.post(path, body, media_type)
    assert (found, answer) == (status, {"error": error.message, "error_type": kind})
    assert browser.headers["content-type"] == "application/json"
    told = {name: browser.headers.get(name) for name in ("retry-after", "retry-after-ms", "www-authenticate")}
    assert {name: value for name, value in told.items() if value} == headers


async def test_our_own_message_is_answered_with_our_own(browser: Browser) -> None:
    media_type = "application/x-protobuf"
    status, answer = await browser.post("/invocations", _MESSAGE.SerializeToString(), media_type)
    result = InferResponse.FromString(answer).result.text_classification
    expected = (200, media_type, ["full"])
    assert (status, browser.headers["content-type"], [label.label for label in result.labels]) == expected
    status, told = await browser.post("/invocations", b"\xff", media_type)
    assert (status, told["error"]) == (400, "body: is no InferRequest of neuronpipe.api.v1")


_WRITER = model_spec("text_generation", name="writer", chat_template="{{ messages }}")
_EMBEDDER = model_spec("sentence_embedding", name="embedder")


def _any(input: TaskInput) -> TaskResult:
    """A text of every writer, a vector of every embedder, and an order of every ranker."""
    text = GeneratedText(text="b", token_ids=[1], finish_reason=FinishReason.FINISH_REASON_END)
    return {
        "text_generation": task_result(text_generation={"sequences": [text]}),
        "sentence_embedding": task_result(sentence_embedding={"embedding": [1, 2]}),
        "rerank": task_result(rerank={"texts": [{"index": 0, "score": 0.5}]}),
    }[str(input.WhichOneof("task"))]


@pytest.mark.parametrize(
    ("body", "task", "found"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "text_generation", "chat.completion"),
        ({"prompt": "a", "max_tokens": 3}, "text_generation", "text_completion"),
        ({"input": ["a"], "dimensions": 2}, "sentence_embedding", "list"),
        ({"query": "a", "documents": ["b"]}, "rerank", None),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/invocations", "/endpoints/{}/invocations"])
async def test_bodies_of_other_protocols_are_answered_as_on_their_own_paths(
    path: str, body: dict[str, object], task: str, found: str | None
) -> None:
    browser = Browser([_WRITER, _EMBEDDER, model_spec("rerank", name="ranker")], _any)
    name = {"text_generation": "writer", "sentence_embedding": "embedder", "rerank": "ranker"}[task]
    status, answer = await browser.post(path.format(name), body)
    assert (status, answer.get("object"), answer["model"]) == (200, found, name)
    assert browser.inputs[0].WhichOneof("task") == task


async def test_a_field_that_another_protocol_does_not_have_is_refused_by_its_name() -> None:
    browser = Browser([_EMBEDDER], _any)
    status, answer = await browser.post("/invocations", {"input": "a", "instruction": "Find."})
    assert (status, answer["error"]) == (400, "instruction: is not supported")


async def test_a_word_of_another_protocol_in_a_text_is_a_part_of_the_text(browser: Browser) -> None:
    text = '{"messages": [], "prompt": "b"}'
    assert await browser.post("/invocations", {"inputs": text}) == (200, [_labels(text)])


@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        (b'{"inputs": "a", "stream": true}', "application/json"),
        (b'{"inputs": "a", "stream": true}\n', "application/jsonlines"),
    ],
)
async def test_a_stream_where_there_is_none_is_refused(browser: Browser, body: bytes, media_type: str) -> None:
    status, answer = await browser.post("/invocations", body, media_type)
    assert status == 400
    assert answer["error"].startswith("stream: is ")
