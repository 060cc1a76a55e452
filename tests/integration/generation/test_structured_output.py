"""Texts have the form that a request asks for through every door, in one process and in four."""

import asyncio
import json
import os
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.client import AsyncClient
from tests.callers.random_schemas import random_schema

pytestmark = pytest.mark.local_only

_PROMPT = "A module is a file"
_HTTP = ("--http-listen", "127.0.0.1:0")
_SIZE = {"type": "integer", "minimum": 0, "maximum": 99}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": _SIZE},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_REGEX = "[a-c]{2}-[0-9]{1,3}"
_GRAMMAR = 'start: ("go " | "turn ") /[0-9]{2}/ " " ("left" | "right")'
# `make soak` takes 10,000.
_SCHEMAS = int(os.environ.get("NEURONPIPE_SCHEMAS", "300"))
_DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 0}
_WRITER = {"model": "writer"}
_SAY_IT = [{"role": "user", "content": "Say it."}]


@pytest.fixture(scope="module")
def processes(writer_folder: Path) -> Iterator[dict[str, ServiceProcess]]:
    repository = writer_folder / "repository"
    with (
        four_processes(repository, gateway_options=_HTTP) as four,
        ServiceProcess("all", "--repository", str(repository), *_HTTP) as solo,
    ):
        yield {"four processes": four["gateway"], "one process": solo.wait_until_ready()}


@pytest.fixture(params=["four processes", "one process"])
def gateway(request: pytest.FixtureRequest, processes: dict[str, ServiceProcess]) -> ServiceProcess:
    return processes[request.param]


@pytest_asyncio.fixture
async def ours(gateway: ServiceProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.target, timeout_s=120, retries=False) as client:
        yield client


@pytest_asyncio.fixture
async def theirs(gateway: ServiceProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{_url(gateway)}/v1", api_key="none", max_retries=0) as client:
        yield client


def _url(gateway: ServiceProcess) -> str:
    return f"http://{gateway.wait_for('listening for HTTP')['address']}"


def _check(text: str, schema: Any = _SCHEMA) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize(
    "options", [{}, {**_DRAWN, "seed": 3}, {"num_beams": 3}, {"top_logprobs": 2, "min_new_tokens": 100}], ids=str
)
async def test_a_stream_and_a_whole_answer_have_the_form(ours: AsyncClient, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"json_schema": _SCHEMA, "max_new_tokens": 120} | options
    events = [event async for event in ours.generate("writer", _PROMPT, **given)]
    (text,) = events[-1].response.result.text_generation.sequences
    assert text.finish_reason == FinishReason.FINISH_REASON_END
    _check(text.text)
    assert "".join(event.chunk.text for event in events if event.HasField("chunk")) in (text.text, "")
    assert await ours.generate_text("writer", _PROMPT, **given) == text


async def test_several_texts_have_the_form_each_by_itself(ours: AsyncClient) -> None:
    given: dict[str, Any] = {"json_schema": _SCHEMA, "max_new_tokens": 120, "num_return_sequences": 4, "seed": 5}
    events = [event async for event in ours.generate("writer", _PROMPT, **given, **_DRAWN)]
    texts = events[-1].response.result.text_generation.sequences
    assert len({text.text for text in texts}) > 1
    for text in texts:
        _check(text.text)


async def test_a_stop_string_and_the_most_tokens_cut_a_form(ours: AsyncClient) -> None:
    cut = await ours.generate_text("writer", _PROMPT, json_schema=_SCHEMA, stop_strings=[":"])
    assert (cut.text.strip()[-6:], cut.finish_reason) == ('"name"', FinishReason.FINISH_REASON_STOP_STRING)
    short = await ours.generate_text("writer", _PROMPT, json_schema=_SCHEMA, max_new_tokens=3)
    assert short.finish_reason == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"response_format": {"type": "json_object"}}, "object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}}, "schema"),
        ({"extra_body": {"guided_regex": _REGEX}}, "regex"),
        ({"extra_body": {"structured_outputs": {"choice": ["left", "right"]}}}, "choice"),
        ({"extra_body": {"structured_outputs": {"grammar": _GRAMMAR}}}, "grammar"),
    ],
    ids=str,
)
async def test_openais_and_vllms_names_of_forms(theirs: Any, asked: dict[str, Any], form: str) -> None:
    (choice,) = (await theirs.chat.completions.create(messages=_SAY_IT, max_tokens=120, **_WRITER, **asked)).choices
    text, reason = choice.message.content or "", choice.finish_reason
    completion = await theirs.completions.create(prompt=_PROMPT, max_tokens=120, extra_body=_body(asked), **_WRITER)
    assert completion.choices[0].finish_reason in ("stop", "length")
    if form == "object":
        assert text.startswith("{")
        assert reason == "length" or isinstance(json.loads(text), dict)
        return
    assert reason == "stop"
    if form == "schema":
        _check(text)
    else:
        expected = {"regex": _REGEX, "choice": "left|right", "grammar": "(go|turn) [0-9]{2} (left|right)"}[form]
        assert re.fullmatch(expected, text)


def _body(asked: dict[str, Any]) -> dict[str, Any]:
    """Fields of a body that OpenAI's client has no argument for: of completions, `response_format` is one."""
    further: dict[str, Any] = asked.get("extra_body", {})
    return {name: value for name, value in asked.items() if name != "extra_body"} | further


class Thing(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    color: bool
    sizes: list[Annotated[int, pydantic.Field(ge=0, le=99)]] = pydantic.Field(max_length=2)


async def test_openais_client_parses_answers(theirs: Any) -> None:
    options: dict[str, Any] = {"response_format": Thing, "max_tokens": 150, "temperature": 1.5, "seed": 4}
    answer = await theirs.chat.completions.parse(messages=_SAY_IT, **_WRITER, **options)
    assert isinstance(answer.choices[0].message.parsed, Thing)


async def test_huggingfaces_client_and_tgis_names_of_forms(gateway: ServiceProcess) -> None:
    async with huggingface_hub.AsyncInferenceClient(model=_url(gateway), timeout=60) as client:
        for grammar in ({"type": "json", "value": _SCHEMA}, {"type": "json_schema", "value": {"schema": _SCHEMA}}):
            _check(await client.text_generation(_PROMPT, grammar=grammar, max_new_tokens=120))
        regex: Any = {"type": "regex", "value": _REGEX}
        tokens = await client.text_generation(_PROMPT, grammar=regex, max_new_tokens=40, stream=True)
        assert re.fullmatch(_REGEX, "".join([token async for token in tokens]))
        wrong: Any = {"type": "json", "value": {"not": {}}}
        refused = huggingface_hub.errors.TextGenerationError
        with pytest.raises(refused, match=r"parameters\.grammar\.value: cannot be followed"):
            await client.text_generation(_PROMPT, grammar=wrong, max_new_tokens=4)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"guided_json": {"contains": {}}}}, "guided_json"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex"),
        ({"extra_body": {"guided_grammar": "start: nothing"}}, "guided_grammar"),
        ({"extra_body": {"structured_outputs": {"regex": "a" * 4097}}}, "structured_outputs.regex"),
        ({"extra_body": {"guided_regex": "a"}, "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
    ids=str,
)
async def test_forms_that_are_refused_are_named_as_their_callers_do(
    theirs: Any, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await theirs.completions.create(model="writer", prompt=_PROMPT, extra_body=_body(asked))
    assert refused.value.param == param


_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _SCHEMA}},
    {
        "type": "function",
        "function": {"name": "wait", "parameters": {"$ref": "#/$defs/Time", "$defs": {"Time": {"const": {"s": 1}}}}},
    },
]
_CHOSEN: Any = {"type": "function", "function": {"name": "look"}}
_WRONG = {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}
_ASKED: list[Any] = [{"role": "user", "content": "Look."}]


def _check_calls(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, arguments in calls:
        _check(arguments, {"look": _SCHEMA, "wait": {"const": {"s": 1}}}[name])


@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}, {"tool_choice": _CHOSEN}], ids=str)
async def test_a_forced_call_of_a_tool_has_valid_arguments(theirs: Any, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"tool_choice": "required", "max_tokens": 120, "seed": 6, **options}
    asked: dict[str, Any] = {"model": "writer", "messages": _ASKED, "tools": _TOOLS, **given}
    (choice,) = (await theirs.chat.completions.create(**asked)).choices
    assert choice.message.content is None
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    _check_calls(calls)
    assert len(calls) == 1 or not options
    assert choice.finish_reason == ("stop" if "tool_choice" in options else "tool_calls")
    async with theirs.chat.completions.stream(**asked) as stream:
        (streamed,) = (await stream.get_final_completion()).choices
    again = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls or ()]
    assert (again, streamed.finish_reason) == (calls, choice.finish_reason)


async def test_calls_of_a_free_choice_are_streamed_as_openais_client_assembles_them(theirs: Any) -> None:
    name = " ".join(map(str, range(24)))
    calls = [("look", f'{{"name": "{name}", "size": 41}}'), ("wait", '{"s": 1}')]
    # The text is given, so that the model writes what one with tools would.
    said = "[" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"
    asked: dict[str, Any] = {"model": "writer", "messages": _ASKED, "tools": _TOOLS, "max_tokens": 150}
    asked["extra_body"] = {"guided_choice": [said]}
    deltas: list[Any] = []
    async with theirs.chat.completions.stream(**asked) as stream:
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                deltas += event.chunk.choices[0].delta.tool_calls or ()
        (choice,) = (await stream.get_final_completion()).choices
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == calls
    assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
    begins = [delta for delta in deltas if delta.id]
    assert [(begin.index, begin.function and begin.function.name) for begin in begins] == [(0, "look"), (1, "wait")]
    # In how many pieces is not asked: a stream joins what waits for a slow reader. test_tool_calls.py cuts texts.
    assert all(delta.function and delta.function.arguments for delta in deltas if not delta.id)
    (whole,) = (await theirs.chat.completions.create(**asked)).choices
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()] == calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    asked["extra_body"] = {"guided_choice": ["No tool is called."]}
    async with theirs.chat.completions.stream(**asked) as stream:
        (choice,) = (await stream.get_final_completion()).choices
    assert (choice.message.content, choice.finish_reason) == ("No tool is called.", "stop")


_FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in _TOOLS]


@pytest.mark.parametrize(
    "options", [{"parallel_tool_calls": False}, {"tool_choice": {"type": "function", "name": "look"}}], ids=str
)
async def test_a_forced_call_of_a_response_has_valid_arguments(theirs: Any, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "writer", "input": "Look.", "tools": _FLAT, "tool_choice": "required", **options}
    answer = await theirs.responses.create(**asked, temperature=0, max_output_tokens=120)
    calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
    assert len(calls) == len(answer.output) == 1
    _check_calls(calls)
    given: list[Any] = [{"role": "user", "content": "Look."}, *answer.output]
    given += [{"type": "function_call_output", "call_id": item.call_id, "output": "dark"} for item in answer.output]
    again = await theirs.responses.create(**asked | {"input": given, "tool_choice": "none"}, max_output_tokens=4)
    assert again.usage.input_tokens > answer.usage.input_tokens


async def test_calls_of_a_response_are_streamed_as_openais_client_assembles_them(theirs: Any) -> None:
    arguments = {"look": {"name": " ".join(map(str, range(8))), "size": 41}, "wait": {"s": 1}}
    tools = [tool | {"parameters": {"type": "object", "const": arguments[tool["name"]]}} for tool in _FLAT]
    asked: dict[str, Any] = {"model": "writer", "input": "Look.", "tools": tools, "max_output_tokens": 160}
    # The model calls again and again, until it is cut.
    async with theirs.responses.stream(tool_choice="required", **asked) as stream:
        events: list[Any] = [event async for event in stream]
    whole = events[-1].response
    *calls, _ = whole.output
    assert [json.loads(item.arguments) for item in calls] == [arguments[item.name] for item in calls]
    assert len(calls) >= 2
    assert [event.sequence_number for event in events] == [*range(len(events))]
    # In how many pieces arguments come is not asked.
    types = [event.type.removeprefix("response.") for event in events]
    kept = [name for name, before in zip(types, ["", *types], strict=False) if name != before]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kept[: 2 + len(call) * len(calls)] == ["created", "in_progress", *(call * len(calls))]
    assert kept[-1] == "incomplete"
    for place, item in enumerate(calls):
        assert item.type == "function_call"
        own = [event for event in events if getattr(event, "output_index", None) == place]
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
        *deltas, done = [event for event in own if "arguments" in event.type]
        assert "".join(delta.delta for delta in deltas) == done.arguments == item.arguments
        assert (done.name, own[0].item.call_id, own[0].item.arguments) == (item.name, item.call_id, "")
        assert own[-1].item.model_dump() == item.model_dump(exclude={"parsed_arguments"})


async def test_tools_of_a_free_choice_and_of_the_history_are_in_the_prompt(theirs: Any) -> None:
    async def used(messages: list[Any], **options: Any) -> int:
        answer = await theirs.chat.completions.create(model="writer", messages=messages, max_tokens=4, **options)
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls
        return int(answer.usage.prompt_tokens)

    call = {"id": "call_1", "type": "function", "function": {"name": "wait", "arguments": '{"s": 1}'}}
    history = [
        *_ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    bare = await used(_ASKED)
    assert await used(_ASKED, tools=_TOOLS[1:]) > bare
    assert await used(_ASKED, tools=_TOOLS[1:], tool_choice="none") == bare
    assert await used(history) > await used([history[0], history[1] | {"content": "", "tool_calls": []}, history[2]])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": _TOOLS[1:], "tool_choice": _CHOSEN}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": _TOOLS, "tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "tool_choice"),
        ({"tools": [_WRONG], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [*_TOOLS, _WRONG], "tool_choice": "required"}, "tools"),
    ],
    ids=str,
)
async def test_wrong_tools_are_refused_by_name(theirs: Any, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await theirs.chat.completions.create(model="writer", messages=_ASKED, **asked)
    assert refused.value.param == param


async def test_texts_by_random_schemas_are_valid(processes: dict[str, ServiceProcess]) -> None:
    """Through four processes. A schema that is refused, or a text that ends and is not valid, is an error."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, ended = random.Random(seed), 0
    async with AsyncClient(processes["four processes"].target, timeout_s=300) as client:
        room = asyncio.Semaphore(32)

        async def write(schema: dict[str, Any], number: int) -> bool:
            manner = _DRAWN | {"seed": number} if number % 4 else {"num_beams": 1 + number % 3}
            async with room:
                text = await client.generate_text("writer", "Say", json_schema=schema, max_new_tokens=160, **manner)
            if text.finish_reason == FinishReason.FINISH_REASON_LENGTH:
                return False
            try:
                _check(text.text, schema)
            except Exception as error:
                raise AssertionError(f"{text.text!r} by {json.dumps(schema)}") from error
            return True

        for _ in range(0, _SCHEMAS, 100):
            schemas = [random_schema(chance) for _ in range(min(100, _SCHEMAS))]
            ended += sum(await asyncio.gather(*(write(schema, number) for number, schema in enumerate(schemas))))
    assert ended > 0.7 * _SCHEMAS, f"only {ended} texts came to an end"
