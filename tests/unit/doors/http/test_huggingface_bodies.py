"""Hugging Face's forms of generation: every option of `generate` by its name, and none that is ignored."""

import json
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import CacheControl
from neuronpipe.api.v1.tasks_pb2 import (
    EarlyStopping,
    FinishReason,
    GeneratedText,
    GenerationOptions,
    SummarizationResult,
    TaskInput,
    TaskResult,
    TextGenerationResult,
    TokenSequence,
    TranslationResult,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.doors.http.huggingface_bodies import WritingOptions
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec

_SPECS = [
    model_spec("summarization", name="summarization", decoder_start_token_ids=(2,), max_text_tokens=9),
    model_spec("translation", name="translation", decoder_start_token_ids=(2,), max_text_tokens=9),
    model_spec("text_generation", name="text_generation"),
]
_WRITERS = ["summarization", "translation"]


def _value(number: int, name: str, kind: str) -> Any:
    """A value for an option, as GenerationOptions has it, that no other option of its kind has, where it can be."""
    given = {"text": name, "texts": [name], "tokens": [5, 6], "sequences": [[1, 2], [3]], "json": '{"type": "object"}'}
    return {"float": number / 64, "int": number, "token": number, **given}.get(kind, True)


_OPTIONS = {
    name: _value(number, name, option.kind)
    for number, (name, option) in enumerate(OPTIONS.items(), 1)
    if option.huggingface
}


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    task = str(input.WhichOneof("task"))
    count = getattr(input, task).options.num_return_sequences or 1
    reason = FinishReason.FINISH_REASON_LENGTH
    texts = [GeneratedText(text=f" text {number}", finish_reason=reason) for number in range(count)]
    return {
        "summarization": TaskResult(summarization=SummarizationResult(sequences=texts)),
        "translation": TaskResult(translation=TranslationResult(sequences=texts)),
        "text_generation": TaskResult(text_generation=TextGenerationResult(sequences=texts)),
    }[task]


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


def _asked(browser: Browser) -> Any:
    (input,) = browser.inputs
    return getattr(input, str(input.WhichOneof("task")))


def test_every_option_has_its_name() -> None:
    assert set(_OPTIONS) <= set(WritingOptions.model_fields)


@pytest.mark.parametrize("place", ["parameters", "generate_parameters"])
@pytest.mark.parametrize("task", [*_WRITERS, "text_generation"])
async def test_options_arrive(browser: Browser, task: str, place: str) -> None:
    if (task, place) == ("text_generation", "generate_parameters"):
        pytest.skip("this form has no such field")
    given = _OPTIONS if place == "parameters" else {place: _OPTIONS}
    status, _ = await browser.post(f"/models/{task}", {"inputs": "t", "parameters": given})
    words = [TokenSequence(token_ids=[1, 2]), TokenSequence(token_ids=[3])]
    changed = {"bad_words_ids": words, "early_stopping": EarlyStopping.EARLY_STOPPING_TRUE}
    assert status == 200
    assert _asked(browser).options == GenerationOptions(**(_OPTIONS | changed))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"early_stopping": "never"}, {"early_stopping": EarlyStopping.EARLY_STOPPING_NEVER}),
        ({"early_stopping": False}, {"early_stopping": EarlyStopping.EARLY_STOPPING_FALSE}),
        ({"stop_strings": "ab"}, {"stop_strings": ["ab"]}),
        # Both lengths count the token that the text follows.
        ({"max_length": 9, "min_length": 4}, {"max_new_tokens": 8, "min_new_tokens": 3}),
        ({"min_length": 0}, {"min_new_tokens": 0}),
        ({"json_schema": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"clean_up_tokenization_spaces": False, "use_cache": True, "num_beam_groups": 1, "typical_p": 1.0}, {}),
    ],
)
async def test_options_of_the_writing_tasks(browser: Browser, given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert (await browser.post("/models/summarization", {"inputs": "t", "parameters": given}))[0] == 200
    assert _asked(browser).options == GenerationOptions(**expected)


@pytest.mark.parametrize("path", ["/generate", "/models/text_generation", "/models/summarization"])
async def test_penalties_are_taken_as_in_tgi(browser: Browser, path: str) -> None:
    penalties: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": -0.5}
    status, _ = await browser.post(path, {"inputs": "t", "parameters": penalties})
    assert (status, _asked(browser).options) == (200, GenerationOptions(**penalties))


async def test_stop_strings_of_all_names_are_taken(browser: Browser) -> None:
    given = {"stop": ["a"], "stop_sequences": ["b"], "stop_strings": ["c"]}
    assert (await browser.post("/models/text_generation", {"inputs": "t", "parameters": given}))[0] == 200
    assert {*_asked(browser).options.stop_strings} == {"a", "b", "c"}


@pytest.mark.parametrize("task", [*_WRITERS, "text_generation"])
@pytest.mark.parametrize(
    ("given", "cut"),
    [
        ({"truncation": True}, Truncation.TRUNCATION_RIGHT),
        ({"truncation": "longest_first"}, Truncation.TRUNCATION_RIGHT),
        ({"truncation": False}, Truncation.TRUNCATION_ERROR),
        ({"truncation": "do_not_truncate"}, Truncation.TRUNCATION_ERROR),
    ],
)
async def test_truncation(browser: Browser, task: str, given: dict[str, Any], cut: int) -> None:
    assert (await browser.post(f"/models/{task}", {"inputs": "t", "parameters": given}))[0] == 200
    assert _asked(browser).truncation == cut


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        ("/v1/completions", {"prompt": "t", "truncate_prompt_tokens": 5}, 5),
        ("/v1/completions", {"prompt": [1, 2], "truncate_prompt_tokens": -1}, 0),
        ("/generate", {"inputs": "t", "parameters": {"truncate": 5}}, 5),
    ],
)
async def test_prompts_keep_their_ends_as_in_vllm(browser: Browser, path: str, body: dict[str, Any], kept: int) -> None:
    assert (await browser.post(path, {"model": "text_generation", **body}))[0] == 200
    assert (_asked(browser).truncation, _asked(browser).truncation_tokens) == (Truncation.TRUNCATION_LEFT, kept)


async def test_several_texts_of_one_input_are_a_list(browser: Browser) -> None:
    several = {"num_return_sequences": 2, "do_sample": True}
    _, texts = await browser.post("/models/summarization", {"inputs": "t", "parameters": several})
    assert texts == [{"summary_text": " text 0"}, {"summary_text": " text 1"}]
    _, texts = await browser.post(
        "/models/translation", {"inputs": "t", "parameters": {"generate_parameters": several}}
    )
    assert texts == [{"translation_text": " text 0"}, {"translation_text": " text 1"}]
    body = {"inputs": "t", "parameters": several | {"return_full_text": True}}
    _, texts = await browser.post("/models/text_generation", body)
    assert texts == [{"generated_text": "t text 0"}, {"generated_text": "t text 1"}]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_an_answer_of_one_text_has_no_room_for_several(browser: Browser, path: str) -> None:
    body = {"inputs": "t", "parameters": {"num_return_sequences": 2, "do_sample": True}}
    status, answer = await browser.post(path, body)
    assert (status, answer["error"].split(":")[0]) == (400, "parameters.num_return_sequences")


@pytest.mark.parametrize(
    ("task", "given", "error"),
    [
        ("summarization", {"max_tokens": 5}, "max_tokens: is not supported"),
        ("summarization", {"guidance_scale": 2}, "guidance_scale: is not supported"),
        ("summarization", {"typical_p": 0.5}, "typical_p: is not supported"),
        ("summarization", {"src_lang": "en"}, "src_lang: is not supported"),
        ("translation", {"generate_parameters": {"max_tokens": 5}}, "generate_parameters.max_tokens: is not supported"),
        ("text_generation", {"max_tokens": 5}, "max_tokens: is not supported"),
        ("text_generation", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces: is not"),
        ("text_generation", {"max_length": 50}, "max_length: is not supported, because it counts the prompt"),
        ("text_generation", {"min_length": 5}, "min_length: is not supported, because it counts the prompt"),
        ("summarization", {"max_length": 1}, "max_length: must be at least 2"),
        ("summarization", {"max_length": 5, "max_new_tokens": 5}, "max_length: cannot be combined with max_new_tokens"),
        (
            "summarization",
            {"num_beams": 2, "generate_parameters": {"num_beams": 3}},
            "num_beams: is also in generate_parameters",
        ),
    ],
)
async def test_what_is_not_known_is_refused_by_name(
    browser: Browser, task: str, given: dict[str, Any], error: str
) -> None:
    status, answer = await browser.post(f"/models/{task}", {"inputs": "t", "parameters": given})
    assert (status, browser.inputs) == (400, [])
    assert answer["error"].startswith(f"parameters.{error}")


async def test_fields_beside_the_parameters_are_the_clients_own(browser: Browser) -> None:
    body = {"inputs": "t", "options": {"wait_for_model": True}, "provider": "x"}
    assert (await browser.post("/models/summarization", body))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == "provider, wait_for_model"


@pytest.mark.parametrize("inputs", ["t", ["t", "u"]], ids=str)
@pytest.mark.parametrize(
    ("options", "cache_control"),
    [
        ({}, CacheControl.CACHE_CONTROL_UNSPECIFIED),
        ({"use_cache": True}, CacheControl.CACHE_CONTROL_UNSPECIFIED),
        ({"use_cache": False}, CacheControl.CACHE_CONTROL_BYPASS),
    ],
    ids=str,
)
async def test_an_answer_comes_from_no_cache_where_that_is_asked(
    browser: Browser, inputs: object, options: dict[str, bool], cache_control: "CacheControl.ValueType"
) -> None:
    assert (await browser.post("/models/summarization", {"inputs": inputs, "options": options}))[0] == 200
    assert {request.cache_control for request in browser.pipeline.asked} == {cache_control}
    assert "x-neuronpipe-ignored" not in browser.headers


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"num_beams": 99}, "options.num_beams", "num_beams: is wrong"),
        ({"generate_parameters": {"num_beams": 99}}, "options.num_beams", "generate_parameters.num_beams: is wrong"),
        ({"max_length": 99}, "options.max_new_tokens", "max_length - 1: is wrong"),
    ],
)
async def test_an_error_of_the_pipeline_names_the_options_place(given: dict[str, Any], field: str, told: str) -> None:
    browser = Browser(_SPECS, lambda given: InvalidInput(field, "is wrong"))
    _, answer = await browser.post("/models/summarization", {"inputs": "t", "parameters": given})
    assert answer["error"] == f"parameters.{told}"


@pytest.mark.parametrize("path", ["/generate", "/models/text_generation"])
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["stop"], "parameters.stop"),
        (["stop_sequences"], "parameters.stop_sequences"),
        (["stop_strings"], "parameters.stop_strings"),
        (["stop", "stop_sequences"], "parameters.stop and parameters.stop_sequences"),
    ],
)
async def test_an_error_of_stop_strings_has_the_names_that_were_sent(path: str, names: list[str], told: str) -> None:
    browser = Browser(_SPECS, lambda given: InvalidInput("options.stop_strings", "is wrong"))
    body = {"inputs": "t", "parameters": {name: ["a"] for name in names}}
    _, answer = await browser.post(path, body)
    assert answer["error"] == f"{told}: is wrong"


async def test_what_is_wrong_with_an_option_is_said_in_the_forms_words() -> None:
    problem = "9, more than max_new_tokens, 8"
    browser = Browser(_SPECS, lambda given: InvalidInput("options.min_new_tokens", problem, ["options.max_new_tokens"]))
    given = {"min_length": 10, "max_length": 9}
    _, answer = await browser.post("/models/summarization", {"inputs": "t", "parameters": given})
    assert answer["error"] == "parameters.min_length - 1: 9, more than parameters.max_length - 1, 8"


_SCHEMA = {"type": "object"}
_NAMED = {"name": "x", "strict": True, "schema": _SCHEMA}
_TEXTS = "/v1/completions"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": _NAMED}}, {"json_schema": '{"type": "object"}'}),
        # TGI's, as huggingface_hub documents them.
        ({"response_format": {"type": "json", "value": _SCHEMA}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json_object", "value": _SCHEMA}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "regex", "value": "a"}}, {"regex": "a"}),
        ({"guided_json": _SCHEMA}, {"json_schema": '{"type": "object"}'}),
        ({"guided_json": "{}"}, {"json_schema": "{}"}),
        ({"guided_regex": "a"}, {"regex": "a"}),
        ({"guided_choice": ["a", "b"]}, {"choices": ["a", "b"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"json": _SCHEMA}}, {"json_schema": '{"type": "object"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choices": ["a"]}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
    ],
    ids=str,
)
async def test_openais_and_vllms_forms_of_texts(
    browser: Browser, asked: dict[str, Any], expected: dict[str, Any]
) -> None:
    status, answer = await browser.post("/v1/completions", {"model": "text_generation", "prompt": "t", **asked})
    assert status == 200, answer
    assert _asked(browser).options == GenerationOptions(max_new_tokens=16, **expected)


async def test_a_text_that_ignores_its_end_has_as_many_tokens_as_it_may(browser: Browser) -> None:
    body = {"model": "text_generation", "prompt": "t", "ignore_eos": True, "min_tokens": 2, "skip_special_tokens": True}
    assert (await browser.post("/v1/completions", body | {"max_tokens": 7}))[0] == 200
    assert _asked(browser).options == GenerationOptions(max_new_tokens=7, min_new_tokens=7, skip_special_tokens=True)
    chat = {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    status, answer = await browser.post("/v1/chat/completions", chat)
    assert (status, answer["error"]["param"]) == (400, "ignore_eos")


async def test_ids_of_tokens_come_with_a_text_that_asks_for_them() -> None:
    text = GeneratedText(text="a", token_ids=[5, 6], finish_reason=FinishReason.FINISH_REASON_END)
    browser = Browser(_SPECS, lambda given: TaskResult(text_generation=TextGenerationResult(sequences=[text])))
    for asked, expected in ({"return_token_ids": True}, [5, 6]), ({}, None):
        _, answer = await browser.post("/v1/completions", {"model": "text_generation", "prompt": "t", **asked})
        assert answer["choices"][0].get("token_ids") == expected


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ({"type": "json", "value": _SCHEMA}, {"json_schema": '{"type": "object"}'}),
        ({"type": "json", "value": "{}"}, {"json_schema": "{}"}),
        ({"type": "json_schema", "value": {"name": "x", "schema": _SCHEMA}}, {"json_schema": '{"type": "object"}'}),
        ({"type": "regex", "value": "a"}, {"regex": "a"}),
    ],
    ids=str,
)
async def test_tgis_forms_of_texts(browser: Browser, grammar: dict[str, Any], expected: dict[str, Any]) -> None:
    body = {"inputs": "t", "parameters": {"grammar": grammar}}
    for path in ("/generate?model=text_generation", "/models/text_generation"):
        assert (await browser.post(path, body))[0] == 200
    assert [input.text_generation.options for input in browser.inputs] == [GenerationOptions(**expected)] * 2


@pytest.mark.parametrize(
    ("path", "asked", "problem"),
    [
        (_TEXTS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
        (_TEXTS, {"response_format": {"type": "xml"}}, "response_format.type"),
        (_TEXTS, {"response_format": {"type": "json"}}, "response_format.value: must be a text or an"),
        (_TEXTS, {"response_format": {"type": "regex", "value": {}}}, "response_format.value: must be a"),
        (_TEXTS, {"max_completion_tokens": 5}, "max_completion_tokens: is not supported"),  # of chats
        (_TEXTS, {"tool_choice": "required"}, "tool_choice: is not supported"),
        (_TEXTS, {"regex": "a"}, "regex: is not supported; use guided_regex"),
        (_TEXTS, {"ebnf": "root ::= a"}, "ebnf: is not supported; use guided_grammar"),
        (_TEXTS, {"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag: is not"),
        (_TEXTS, {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs.regex: is"),
        ("/generate", {"parameters": {"grammar": {"type": "regex", "value": {}}}}, "parameters.grammar.value: must be"),
        ("/generate", {"parameters": {"grammar": {"type": "lark", "value": "a"}}}, "parameters.grammar.type"),
        (
            "/generate",
            {"parameters": {"grammar": {"type": "json", "value": "{}"}, "regex": "a"}},
            "parameters.grammar: ",
        ),
    ],
    ids=str,
)
async def test_forms_that_are_wrong_are_named(browser: Browser, path: str, asked: dict[str, Any], problem: str) -> None:
    body = {"model": "text_generation", "inputs" if path == "/generate" else "prompt": "t"} | asked
    status, answer = await browser.post(path, body)
    assert status in (400, 422)
    assert problem in str(answer)


_LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA, "strict": True},
}


@pytest.mark.parametrize(("arguments", "expected"), [("", {}), ("{}", {}), ("no JSON", "no JSON")])
async def test_arguments_of_a_call_are_an_object_in_templates(browser: Browser, arguments: str, expected: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    await browser.post("/v1/chat/completions", {"model": "text_generation", "messages": messages})
    (told,) = json.loads(_asked(browser).messages[0].fields)["tool_calls"]
    assert told["function"]["arguments"] == expected


async def test_tools_and_calls_reach_the_template_and_calls_are_answered() -> None:
    said = '{"name": "look", "arguments": {"at": 1}}'

    def answer(input: TaskInput) -> TaskResult:
        text = GeneratedText(text=said, finish_reason=FinishReason.FINISH_REASON_END)
        return TaskResult(text_generation=TextGenerationResult(sequences=[text]))

    browser = Browser([model_spec("text_generation", name="m", chat_template="{{ messages }}{{ tools }}")], answer)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 0}'}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "dark", "name": "look"},
        {"role": "assistant", "content": "It is", "prefix": True, "tool_calls": []},
    ]
    status, answered = await browser.post(
        "/v1/chat/completions", {"model": "m", "messages": messages, "tools": [_LOOK]}
    )
    assert status == 200, answered
    asked = browser.inputs[0].text_generation
    assert asked.tools == json.dumps([_LOOK])  # in this order, which transformers writes, too
    call["function"] = {"name": "look", "arguments": {"at": 0}}
    expected: list[Any] = [
        {},
        {"tool_calls": [call], "content": None, "reasoning_content": "so"},
        {"tool_call_id": "1", "name": "look"},
        {"prefix": True},
    ]
    assert [json.loads(message.fields or "{}") for message in asked.messages] == expected
    (choice,) = answered["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}

    forced = {"model": "m", "messages": messages[:1], "tools": [_LOOK], "tool_choice": "required"}
    await browser.post("/v1/chat/completions", forced)
    assert json.loads(browser.inputs[1].text_generation.options.json_schema)["minItems"] == 1
    await browser.post("/v1/chat/completions", forced | {"tool_choice": "none"})
    assert not browser.inputs[2].text_generation.tools
    await browser.post("/v1/chat/completions", forced | {"tool_choice": {"function": {"name": "look"}}})  # TGI's
    assert json.loads(browser.inputs[3].text_generation.options.json_schema) == _SCHEMA


async def test_the_developer_of_a_chat_is_the_system_of_templates(browser: Browser) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "t"}]
    status, _ = await browser.post("/v1/chat/completions", {"model": "text_generation", "messages": messages})
    assert (status, [message.role for message in _asked(browser).messages]) == (200, ["system", "user"])


@pytest.mark.parametrize("path", ["/v1/completions", "/models/text_generation/v1/completions"])
@pytest.mark.parametrize("model", ["http://127.0.0.1:8080/models/other", "https://host/v1/", "dummy", None])
async def test_an_address_names_no_model(browser: Browser, path: str, model: str | None) -> None:
    status, answer = await browser.post(path, {"model": model, "prompt": "t"})
    assert (status, answer.get("model")) == (200, "text_generation")


_OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
_OBJECT_JSON = json.dumps(_OBJECT)
_MESSAGES = [{"role": "user", "content": "t"}]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object", "schema": _OBJECT}, {"json_schema": _OBJECT_JSON}),  # llama.cpp, Together
        ({"type": "json_schema", "schema": _OBJECT}, {"json_schema": _OBJECT_JSON}),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": _OBJECT}}, {"json_schema": _OBJECT_JSON}),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}, "schema": _OBJECT}, "response_format"),
        ({"type": "json_object", "value": {}, "schema": _OBJECT}, "response_format"),
        ({"type": "regex", "value": "a", "json_schema": {"name": "a", "schema": _OBJECT}}, "response_format"),
        ({"type": "text", "schema": {}}, "response_format.type"),
        ({"type": "text", "schema": _OBJECT}, "response_format.type"),
        ({"type": "text", "json_schema": {"name": "a", "schema": _OBJECT}}, "response_format.type"),
    ],
    ids=str,
)
async def test_a_schema_is_applied_or_refused_by_name(browser: Browser, form: dict[str, Any], expected: Any) -> None:
    body = {"model": "text_generation", "messages": _MESSAGES, "response_format": form}
    status, answer = await browser.post("/v1/chat/completions", body)
    if isinstance(expected, str):
        assert (status, answer["error"]["param"]) == (400, expected)
    else:
        assert status == 200
        assert _asked(browser).options == GenerationOptions(**expected)


async def test_efforts_and_verbosity_are_variables_of_the_template(browser: Browser) -> None:
    body = {"model": "text_generation", "messages": _MESSAGES, "reasoning_effort": "low", "verbosity": "low"}
    assert (await browser.post("/v1/chat/completions", body))[0] == 200
    assert json.loads(_asked(browser).template_arguments) == {"reasoning_effort": "low", "verbosity": "low"}


async def test_refusals_of_the_history_are_texts(browser: Browser) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    said = [
        {"role": "assistant", "content": [part, {"type": "text", "text": " Sorry."}]},
        {"role": "assistant", "content": None, "refusal": "No."},
    ]
    body = {"model": "text_generation", "messages": [*said, *_MESSAGES]}
    assert (await browser.post("/v1/chat/completions", body))[0] == 200
    assert [message.content for message in _asked(browser).messages] == ["I cannot. Sorry.", "No.", "t"]


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_tools_that_are_allowed_are_those_that_may_be_called(mode: str) -> None:
    text = GeneratedText(text='{"name": "look", "arguments": {}}', finish_reason=FinishReason.FINISH_REASON_END)
    answer = TaskResult(text_generation=TextGenerationResult(sequences=[text]))
    spec = model_spec("text_generation", name="m", chat_template="{{ messages }}{{ tools }}")
    browser = Browser([spec], lambda _: answer)
    tools = [_LOOK, {"type": "function", "function": {"name": "wait"}}]
    for name, is_called in (("look", True), ("wait", False)):
        allowed: dict[str, Any] = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
        choice: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": allowed}
        body = {"model": "m", "messages": _MESSAGES, "tools": tools, "tool_choice": choice}
        status, answered = await browser.post("/v1/chat/completions", body)
        assert status == 200
        assert ("tool_calls" in answered["choices"][0]["message"]) is is_called
        asked = browser.inputs[-1].text_generation
        assert json.loads(asked.tools) == tools
        if mode == "required":
            calls = json.loads(asked.options.json_schema)["items"]["anyOf"]
            assert [call["properties"]["name"]["const"] for call in calls] == [name]
    choice["allowed_tools"]["tools"][0]["function"]["name"] = "none"
    status, answered = await browser.post("/v1/chat/completions", body)
    assert (status, answered["error"]["param"]) == (400, "tool_choice.allowed_tools")
