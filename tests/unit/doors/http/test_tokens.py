"""doors/http/tokens.py, and where TEI says that tokens are (doors/vectors.py)."""

import pytest

from neuronpipe.api.v1.tasks_pb2 import DetokenizationResult, TaskInput, TaskResult, Token, TokenizationResult
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import image_spec, model_spec

_CLS = Token(token_id=1, text="[CLS]", is_special=True)


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    if input.WhichOneof("task") == "detokenization":
        ids = input.detokenization.token_ids
        return TaskResult(detokenization=DetokenizationResult(text=" ".join(map(str, ids))))
    text, special = input.tokenization.text, [] if input.tokenization.skip_special_tokens else [_CLS]
    if not text:
        return InvalidInput("text", "is empty")
    tokens = [Token(token_id=9, text=char, start=place, end=place + 1) for place, char in enumerate(text)]
    return TaskResult(tokenization=TokenizationResult(tokens=[*special, *tokens]))


@pytest.fixture
def browser() -> Browser:
    return Browser([image_spec(name="viewer"), model_spec("fill_mask")], _answer)


async def test_a_special_token_has_no_place(browser: Browser) -> None:
    assert await browser.post("/tokenize", {"inputs": "a"}) == (
        200,
        [
            [
                {"id": 1, "text": "[CLS]", "special": True, "start": None, "stop": None},
                {"id": 9, "text": "a", "special": False, "start": 0, "stop": 1},
            ]
        ],
    )


async def test_places_are_in_bytes(browser: Browser) -> None:
    # One, two, three and four bytes of UTF-8.
    _, ((a, umlaut, sign, emoji),) = await browser.post("/tokenize", {"inputs": "aä猫🐈", "add_special_tokens": False})
    assert [(token["start"], token["stop"]) for token in (a, umlaut, sign, emoji)] == [(0, 1), (1, 3), (3, 6), (6, 10)]


async def test_several_texts_have_a_list_each(browser: Browser) -> None:
    status, lists = await browser.post("/tokenize", {"inputs": ["a", "bc"]})
    assert (status, [len(tokens) for tokens in lists]) == (200, [2, 3])


@pytest.mark.parametrize(("ids", "texts"), [([1, 2], ["1 2"]), ([[1, 2], [3]], ["1 2", "3"])])
async def test_tokens_become_texts(browser: Browser, ids: object, texts: list[str]) -> None:
    assert await browser.post("/decode", {"ids": ids}) == (200, texts)
    assert browser.inputs[0].detokenization.skip_special_tokens  # as with TEI


async def test_vllms_clients_get_ids_of_a_prompt_and_its_text_again(browser: Browser) -> None:
    asked = {"model": "small", "prompt": "ab", "return_token_strs": False}
    expected = {"count": 3, "max_model_len": 16, "tokens": [1, 9, 9], "token_strs": None}
    assert await browser.post("/tokenize", asked) == (200, expected)
    _, bare = await browser.post("/tokenize", asked | {"add_special_tokens": False})
    assert bare["tokens"] == [9, 9]
    assert await browser.post("/detokenize", {"model": "small", "tokens": [1, 9]}) == (200, {"prompt": "1 9"})
    assert not browser.inputs[-1].detokenization.skip_special_tokens  # as with vLLM


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"prompt": ""}, "prompt: is empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages: is not supported"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs: is not supported"),
    ],
    ids=str,
)
async def test_what_vllms_tokens_do_not_have_is_refused_by_name(
    browser: Browser, asked: dict[str, object], problem: str
) -> None:
    status, answer = await browser.post("/tokenize", asked)
    assert (status, answer["error"]) == (400, problem)


async def test_a_model_of_texts_is_taken_where_none_is_named(browser: Browser) -> None:
    await browser.post("/tokenize", {"inputs": "a"})
    assert [request.model for request in browser.pipeline.asked] == ["small"]


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/tokenize", {"inputs": ["a", ""]}, "inputs[1]: is empty"),
        ("/tokenize", {"inputs": "a", "prompt_name": "query"}, "prompt_name: is not supported"),
        ("/tokenize", {"inputs": []}, "inputs: 0 inputs, must be from 1 to 2048"),
        ("/decode", {"ids": [[1], [-1]]}, "ids[1][0]: must be at least 0"),
    ],
)
async def test_an_error_names_its_place(browser: Browser, path: str, body: object, error: str) -> None:
    assert await browser.post(path, body) == (400, {"error": error, "error_type": "Validation"})
