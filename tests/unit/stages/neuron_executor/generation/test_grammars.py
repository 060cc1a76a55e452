"""A text has the form that its request asks for, or ends with the reason length, whatever the model would say."""

import asyncio
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from neuronpipe.api.v1.tasks_pb2 import FinishReason, GenerationOptions, TokenSequence
from neuronpipe.core.errors import InvalidInput, Overloaded
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ExecuteItem
from neuronpipe.doors.http.tool_calls import ToolUse
from neuronpipe.stages.neuron_executor.generation import grammar_jobs
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.generation.grammars import Grammars
from neuronpipe.tasks.text_options import GenerationFacts, check_all_options
from tests.suite.waiting import happens
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.generation.written_decoder import (
    END,
    TOKENIZER_JSON,
    VOCABULARY,
    WrittenDecoder,
    prompt_item,
    running_generator,
)

_END, _LENGTH = FinishReason.FINISH_REASON_END, FinishReason.FINISH_REASON_LENGTH
_SPEC = model_spec("text_generation", max_tokens=256, vocabulary_size=VOCABULARY, end_token_ids=(END,))
_TOKENIZER = Tokenizer.from_buffer(TOKENIZER_JSON)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -20, "maximum": 120},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
_GRAMMAR = 'start: item ("," item)*\nitem: /[a-c]{1,3}/ | "{" start "}"'
_MANNERS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 3, "temperature": 0.7, "repetition_penalty": 1.3},
    {"num_beams": 3, "num_return_sequences": 3},
    {"num_beams": 2, "do_sample": True, "top_k": 0},
    {"min_new_tokens": 30, "no_repeat_ngram_size": 1},
    {"top_logprobs": 2, "bad_words_ids": [TokenSequence(token_ids=[_TOKENIZER.token_to_id('"') or 0])]},
]


def _valid_json(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


def _calls_or_form() -> str:
    """The grammar of a chat with tools and a form of its words."""
    options = GenerationOptions(json_schema=json.dumps(_SCHEMA))
    facts = GenerationFacts(chat_template="<tool_call>", call_mark_ids=())
    tools = [{"function": {"name": "look", "parameters": _SCHEMA}}, {"function": {"name": "wait", "parameters": _NONE}}]
    ToolUse(tools).set_form(options, "function.strict", "response_format", facts)
    return options.grammar


def _is_calls_or_form(text: str) -> bool:
    *calls, rest = text.split("</tool_call>")
    if not calls:
        return _valid_json(text, _SCHEMA)
    for call in calls:
        before, _, written = call.partition("<tool_call>")
        value = json.loads(written)
        jsonschema.validate(value["arguments"], {"look": _SCHEMA, "wait": _NONE}[value["name"]])
        assert not before.strip()
    return not rest.strip()


_NONE: dict[str, Any] = {"type": "object", "additionalProperties": False}
_PAIR = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
_FORMS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": ({"json_schema": json.dumps(_SCHEMA)}, lambda text: _valid_json(text, _SCHEMA)),
    "json_object": ({"json_object": True}, lambda text: _valid_json(text, {"type": "object"})),
    "regex": ({"regex": "[a-c]{2}-[0-9]+(x|yz)"}, lambda text: bool(re.fullmatch("[a-c]{2}-[0-9]+(x|yz)", text))),
    "choices": ({"choices": ["yes", "no", "no,no", 'a"b\\']}, lambda text: text in ("yes", "no", "no,no", 'a"b\\')),
    "grammar": (
        {"grammar": _GRAMMAR},
        # Without the innermost braces, until there are none.
        lambda text: bool(re.fullmatch(_ITEMS, _without_braces(text))),
    ),
    "schema in a grammar": (
        {"grammar": f'start: "a" %json {json.dumps(_PAIR)}'},
        lambda text: text[0] == "a" and json.loads(text[1:]) == [1, 1] and len(text) < 60 + 5 * 41,
    ),
    "calls or form": ({"grammar": _calls_or_form()}, _is_calls_or_form),
}
_ITEMS = "[a-c]{1,3}(,[a-c]{1,3})*"
_NAMES: dict[str, Any] = {chr(0x4E00 + number): {} for number in range(2100)}
_FEW: dict[str, Any] = {chr(0x4E00 + number): {} for number in range(200)}
_WIDE: Any = {"anyOf": [{"properties": {f"{n} {m}": {} for m in range(31)}} for n in range(10)]}
_COSTS = "to compile it would cost"
_NEXT = "properties may come next in a text, the limit is 300"


def _without_braces(text: str) -> str:
    shorter = re.sub(rf"\{{{_ITEMS}\}}", "a", text)
    return text if shorter == text else _without_braces(shorter)


def _generator(blocks: int = 256) -> AbstractAsyncContextManager[TextGenerator]:
    return running_generator(WrittenDecoder(blocks), _SPEC, max_batch_size=8)


def _item(prompt: list[int], max_new_tokens: int = 100, **options: Any) -> ExecuteItem:
    check_all_options(GenerationOptions(max_new_tokens=max_new_tokens, **options), _SPEC)
    return prompt_item(_SPEC, prompt, max_new_tokens, **options)


async def _texts(generator: TextGenerator, item: ExecuteItem) -> list[tuple[str, int]]:
    """The texts, and why each ended."""
    outputs = (await generator.generate(item)).outputs.arrays
    texts = [_TOKENIZER.decode(output["token_ids"].tolist(), skip_special_tokens=True) for output in outputs]
    return [(text, int(one["finish_reason"])) for text, one in zip(texts, outputs, strict=True)]


@pytest.mark.parametrize("manner", _MANNERS, ids=str)
@pytest.mark.parametrize("form", _FORMS)
async def test_a_text_that_ends_has_its_form(form: str, manner: dict[str, Any]) -> None:
    options, has_form = _FORMS[form]
    async with _generator() as generator:
        items = [_item([5, 9 + number], **options, **manner) for number in range(12)]
        found = [text for texts in await asyncio.gather(*(_texts(generator, item) for item in items)) for text in texts]
    assert {reason for _, reason in found} <= {_END, _LENGTH}
    ended = [text for text, reason in found if reason == _END]
    assert [text for text in ended if not has_form(text)] == []
    assert ended or form in ("json_object", "grammar"), "these may go on for ever"


async def test_texts_with_forms_leave_others_as_they_are_also_where_blocks_run_out() -> None:
    async with _generator() as generator:
        alone = [await _texts(generator, _item([7, number], 40)) for number in range(4)]
        formed = [await _texts(generator, _item([8, number], 40, **_FORMS["json_schema"][0])) for number in range(4)]
    async with _generator(blocks=12) as generator:
        items = [_item([7, number], 40) for number in range(4)]
        items += [_item([8, number], 40, **_FORMS["json_schema"][0]) for number in range(4)]
        assert await asyncio.gather(*(_texts(generator, item) for item in items)) == [*alone, *formed]
        assert generator.planner.preemptions


async def test_a_stop_token_with_a_text_ends_a_text_only_where_the_grammar_may_end() -> None:
    closing = [_TOKENIZER.token_to_id(piece) for piece in ("}", '"}', "x")]
    async with _generator() as generator:
        for number in range(8):
            item = _item([6, number], **_FORMS["json_schema"][0], stop_token_ids=closing)
            ((text, reason),) = await _texts(generator, item)
            assert reason == _LENGTH or _valid_json(text, _SCHEMA)


async def test_a_special_stop_token_ends_a_text_as_the_models_own_does() -> None:
    async with _generator() as generator:
        item = _item([6, 3], regex="[a-z]{4}", stop_token_ids=[1, VOCABULARY - 1], min_new_tokens=9)
        prediction = await generator.generate(item)
    token_ids = prediction.outputs.arrays[0]["token_ids"].tolist()
    assert len(token_ids) == 5
    assert token_ids[-1] in (1, END, VOCABULARY - 1)


async def test_a_forced_last_token_gives_way_to_the_form() -> None:
    item = _item([6, 3], 3, regex="[a-z]{8}")
    assert item.options
    item.options.forced_eos_token_id = END  # of the model's generation_config
    async with _generator() as generator:
        ((text, reason),) = await _texts(generator, item)
    assert (len(text), reason) == (3, _LENGTH)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"json_schema": '{"type":'}, "cannot be followed: Expecting value"),
        ({"json_schema": '{"type": "array", "contains": {}}'}, "Unimplemented keys"),
        ({"json_schema": '{"type": "string", "format": "regex"}'}, "Unknown format"),
        ({"json_schema": '{"$ref": "#"}'}, "no text has it"),
        ({"json_schema": '{"multipleOf": 999983}'}, "multipleOf add up to more than 10000"),
        ({"json_schema": '{"multipleOf": 1e999999999}'}, "multipleOf add up to more than 10000"),
        ({"grammar": 'start: %json {"multipleOf": 0.00999983}'}, "multipleOf add up to more than 10000"),
        ({"json_schema": '{"enum": [{"a": [9007199254740993]}]}'}, "enum has a number beyond"),
        ({"json_schema": '{"const": 1e23}'}, "const has a number beyond"),
        ({"json_schema": '{"minimum": -9007199254740993}'}, "minimum has a number beyond"),
        ({"json_schema": '{"minProperties": 2}'}, "minProperties of 2 and 0 required ones"),
        ({"json_schema": '{"const": "\\ud800"}'}, "unexpected end of hex escape"),
        # Its author may choose it, but one text would be valid by both.
        (
            {"json_schema": '{"x-guidance": {"coerce_one_of": true}, "oneOf": [{"minimum": 1}, {"maximum": 2}]}'},
            "oneOf constraints are not supported",
        ),
        ({"json_schema": "[" * 5000 + "]" * 5000}, "nested more than 128 deep"),
        ({"regex": "(a"}, "cannot be followed: at 1(8): invalid regex"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "a\\"}, "it ends within an escape"),
        ({"grammar": 'start: start "a"'}, "no text has it"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
        ({"choices": ["\u4e2d"]}, "no text has it"),
        # These would be compiled for seconds, or without an end.
        ({"json_schema": json.dumps({"properties": _NAMES})}, _COSTS),
        ({"json_schema": json.dumps({"patternProperties": {f"^{name}": {} for name in _NAMES}})}, _COSTS),
        ({"json_schema": json.dumps({"properties": _FEW, "anyOf": [{"required": [one]} for one in _FEW]})}, _COSTS),
        (
            {
                "json_schema": json.dumps(
                    {"$defs": {"a/b": {"properties": _FEW}}}
                    | {"items": {"oneOf": [{"$ref": "#/$defs/a~1b", "required": [one]} for one in _FEW]}}
                )
            },
            _COSTS,
        ),
        ({"json_schema": json.dumps({"allOf": [{"pattern": one} for one in [*_FEW][:24]]})}, _COSTS),
        ({"json_schema": json.dumps({"properties": dict([*_NAMES.items()][:301])})}, _NEXT),
        ({"json_schema": json.dumps(_WIDE)}, _NEXT),
        ({"grammar": 'start: "a" %json ' + json.dumps({"properties": _NAMES})}, _COSTS),
        ({"grammar": "start: T\nT: " + "&".join(f"/.*{one}.*/" for one in _FEW)}, "8 intersections"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_form_that_cannot_be_followed_is_refused_by_name(options: dict[str, Any], problem: str) -> None:
    (field,) = options
    async with _generator() as generator:
        for _ in range(2):  # at once the second time
            with pytest.raises(InvalidInput) as refused:
                await generator.generate(_item([5], **options))
            assert refused.value.field == f"options.{field}"
            assert problem in refused.value.problem


async def _can_write(grammars: Grammars, value: Any, schema: dict[str, Any]) -> bool:
    grammar = await grammars.grammar_for(GenerationOptions(json_schema=json.dumps(schema)))
    assert grammar
    token_ids = [*_TOKENIZER.encode(json.dumps(value, separators=(",", ":"))).ids, END]
    try:
        return all(grammar.allowed(token_ids[:count])[one] for count, one in enumerate(token_ids))
    except InvalidInput:
        return False


async def test_names_of_properties_are_no_keywords_and_may_be_any_string() -> None:
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for name in ("a", "enum", "const"):
        schema = {"properties": {name: {"type": "string", "format": "date"}}, "propertyNames": {"type": "string"}}
        assert await _can_write(own, {name: "2024-02-29"}, schema)
        assert not await _can_write(own, {name: "2023-02-29"}, schema)
    own.close()


async def test_dates_and_times_are_those_that_python_takes() -> None:
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)

    can_write = partial(_can_write, own)
    dates = ["2024-02-29", "2000-02-29", "0004-12-31", "1900-02-28", "0100-10-20", "2023-02-29", "1900-02-29"]
    dates += ["0000-02-29", "2024-04-31"]
    for text in dates:
        for schema in ({"format": "date", "type": "string"}, {"anyOf": [{"format": "date", "allOf": [{}]}]}):
            assert await can_write(text, schema) == (text in dates[:5]), text
        assert await can_write(f"{text}t10:20:30z", {"format": "date-time"}) == (text in dates[:5]), text
    assert not await can_write("2024-02-29t10:20:60z", {"format": "date-time"})
    assert await can_write("23:59:59z", {"format": "time"})
    assert not await can_write("23:59:60z", {"format": "time"})
    own.close()


def _decimal_pattern(digits: int | None, places: int | None) -> str:
    """As pydantic 2.12 writes it (json_schema.py, decimal_schema)."""
    head, whole = r"^(?!^[-+.]*$)[+-]?0*", max(0, (digits or 0) - (places or 0))
    if digits is None:
        return head + (r"\d*\.?\d*$" if places is None else rf"\d*\.?\d{{0,{places}}}0*$")
    ahead = rf"(?:\d{{0,{whole}}}|(?=[\d.]{{1,{digits + 1}}}0*$)"
    return head + ahead + (r"\d*\.\d*0*$)" if places is None else rf"\d{{0,{whole}}}\.\d{{0,{places}}}0*$)")


@pytest.mark.parametrize("digits", [None, 1, 3, 10])
@pytest.mark.parametrize("places", [None, 0, 2, 4])
async def test_pydantics_decimals_are_written_as_numbers_and_as_texts(digits: int | None, places: int | None) -> None:
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    pattern = _decimal_pattern(digits, places)
    text = {"type": "string", "pattern": pattern}
    written = set()
    for one in ("0", "7", "-12", "+123", "0.5", "1.25", "12.5", "1.2345", "123456789012", "0.00001", "", ".", "-", "x"):
        if await _can_write(own, one, text):
            assert re.search(pattern, one), one
            written.add(one)
    assert {"0"} <= written
    assert ("0.5" in written) == (places != 0 and (digits, places) != (1, None))
    assert await _can_write(own, 1.5, {"anyOf": [{"type": "number"}, text]})
    own.close()


async def test_pydantics_sets_are_written_and_whether_items_repeat_is_up_to_the_model() -> None:
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    assert await _can_write(own, [1, 2], schema)
    assert await _can_write(own, [1, 1], schema)
    assert not await _can_write(own, [1, 2, 3], schema)
    own.close()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("path", "/tmp/a", None),
        ("password", "a b", None),
        ("binary", "a", None),
        ("base64", "ywi1", "ywi"),
        ("ipv4network", "10.0.0.1", "x"),
        ("ipvanyaddress", "10.0.0.1", "x"),
        ("uuid4", "f47ac10b-58cc-4372-a567-0e02b2c3d479", "f47ac10b-58cc-1372-a567-0e02b2c3d479"),
    ],
)
async def test_pydantics_formats_are_followed(name: str, right: str, wrong: str | None) -> None:
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    schema = {"type": "string", "format": name}
    assert await _can_write(own, right, schema)
    assert wrong is None or not await _can_write(own, wrong, schema)
    own.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"json_object": True, "regex": "a"}, "options.regex: cannot be combined with json_object"),
        ({"regex": "a" * 4097}, "options.regex: 4097 characters, must be 1 to 4096"),
        ({"json_schema": ""}, "options.json_schema: 0 characters, must be 1 to 65536"),
        ({"choices": [""]}, "options.choices: one has 0 characters, must have 1 to 256"),
        ({"choices": ["a"] * 257}, "options.choices: 257, the limit is 256"),
        ({"regex": "a", "forced_bos_token_id": 3}, "options.forced_bos_token_id: cannot be combined with regex"),
        ({"regex": "a", "forced_eos_token_id": 3}, "options.forced_eos_token_id: cannot be combined with regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_forms_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_all_options(GenerationOptions(**options), _SPEC)
    assert problem in refused.value.message


def test_a_model_whose_texts_never_end_takes_no_form() -> None:
    spec = model_spec("text_generation", max_tokens=64, vocabulary_size=VOCABULARY)
    with pytest.raises(InvalidInput, match=r"options\.regex: model 'small' has no token that ends a text"):
        check_all_options(GenerationOptions(regex="a"), spec)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            r"the model's tokenizer \(BPE, decoder WordPiece\) is not supported",
        ),
        ({"added_tokens": []}, "has no special token that ends a text"),
    ],
    ids=["decoder", "end"],
)
async def test_a_tokenizer_that_is_not_supported_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    own = Grammars(_SPEC, lambda: json.dumps(json.loads(TOKENIZER_JSON) | changes).encode())
    with pytest.raises(InvalidInput, match=problem):
        await own.grammar_for(GenerationOptions(regex="a"))
    own.close()


async def test_texts_of_a_tokenizer_with_byte_fallback_have_their_form() -> None:
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<s>", "<pad>", "</s>", *every_byte, "▁", *'abcx{}":,[]', '{"', '":', "▁x"]
    content = json.loads(TOKENIZER_JSON)
    content["model"] |= {"byte_fallback": True, "vocab": {piece: number for number, piece in enumerate(pieces)}}
    content["pre_tokenizer"] = None
    spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    content["decoder"] = {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    written, chance = json.dumps(content), random.Random(3)
    spec = model_spec("text_generation", max_tokens=256, vocabulary_size=300, end_token_ids=(END,))
    own = Grammars(spec, written.encode)
    schema = {"type": "array", "items": {"enum": ["a x", "é", "中\n"]}, "minItems": 1, "maxItems": 3}
    for _ in range(20):
        grammar = await own.grammar_for(GenerationOptions(json_schema=json.dumps(schema)))
        token_ids: list[int] = []
        while grammar and token_ids[-1:] != [END]:
            token_ids.append(chance.choice(np.flatnonzero(grammar.allowed(token_ids)).tolist()))
        _valid_json(Tokenizer.from_str(written).decode(token_ids), schema)
    own.close()


async def test_a_grammar_that_takes_long_is_refused_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_COMPILE_LIMIT_S", 0.2)
    goes_on = threading.Event()

    def tokenizer_json() -> bytes:
        while not goes_on.is_set():  # it computes: a thread that waits for a core costs nothing
            pass
        return TOKENIZER_JSON

    own = Grammars(_SPEC, tokenizer_json)
    first, second = (asyncio.create_task(own.grammar_for(GenerationOptions(regex=regex))) for regex in ("a", "b"))
    assert await own.grammar_for(GenerationOptions()) is None  # at once
    with pytest.raises(InvalidInput, match=r"options\.regex: takes more than 0\.2 s to compile, the limit"):
        await first
    with pytest.raises(Overloaded):
        await second
    monkeypatch.setattr(grammar_jobs, "_COMPILE_LIMIT_S", 60)
    goes_on.set()
    assert await own.grammar_for(GenerationOptions(regex="a"))
    assert await own.grammar_for(GenerationOptions(regex="b"))
    own.close()


async def test_a_compilation_that_takes_long_gives_way_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    slowed = list[int]()
    monkeypatch.setattr(grammar_jobs, "give_way", slowed.append)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for few in ({"enum": [1, 2]}, {"enum": [3]}):
        assert await own.grammar_for(GenerationOptions(json_schema=json.dumps(few)))
    slowed.clear()  # the first grammar loads the library
    names = [*_NAMES][:1900]
    many = {"properties": {name: {} for name in names}, "required": names[::2]}
    assert await own.grammar_for(GenerationOptions(json_schema=json.dumps(many)))
    assert len(slowed) == 1
    own.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars of "slow" are compiled for as long as it is not set."""
    goes_on = threading.Event()
    compile_one = Grammars._compiled

    def compiled(own: Grammars, option: str, text: str) -> Any:
        if text.startswith("slow"):
            goes_on.wait(30)
        return compile_one(own, option, text)

    monkeypatch.setattr(Grammars, "_compiled", compiled)
    yield goes_on
    goes_on.set()


async def test_a_tenants_grammars_take_one_place_and_no_other_tenant_waits_for_them(held: threading.Event) -> None:
    own, waits = Grammars(_SPEC, lambda: TOKENIZER_JSON), list[bool]()
    regexes = [GenerationOptions(regex=f"slow{number}") for number in range(3)]
    slow = [asyncio.create_task(own.grammar_for(options, "mallory", waits.append)) for options in regexes]
    async with asyncio.timeout(10):
        for tenant in ("", "a", "b"):
            assert await own.grammar_for(GenerationOptions(regex="a"), tenant)
        assert not any(one.done() for one in slow)
        await happens(lambda: len(waits) >= 3)
        held.set()
        assert all(await asyncio.gather(*slow))
    assert sorted(waits) == [False] * 3 + [True] * 3
    own.close()


async def test_a_grammar_that_takes_too_long_keeps_its_tenants_place_only_at_the_lowest_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_jobs, "_COMPILE_LIMIT_S", 0.1)
    goes_on, compile_one, ids = threading.Event(), Grammars._compiled, list[int]()

    def compiled(own: Grammars, option: str, text: str) -> Any:
        if text == "slow":
            ids.append(threading.get_native_id())
            while not goes_on.is_set():  # it computes
                pass
        return compile_one(own, option, text)

    monkeypatch.setattr(Grammars, "_compiled", compiled)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    try:
        with pytest.raises(InvalidInput, match=r"options\.regex: takes more than 0\.1 s"):
            await own.grammar_for(GenerationOptions(regex="slow"), "mallory")
        assert os.getpriority(os.PRIO_PROCESS, ids[0]) == 19
        for number in range(3):
            with pytest.raises(Overloaded):
                await own.grammar_for(GenerationOptions(regex=f"a{number}"), "mallory")
        assert len(own._jobs._waiting["mallory"]) == 1, "those that were refused are kept"
        monkeypatch.setattr(grammar_jobs, "_COMPILE_LIMIT_S", 60)
        for tenant in "abcde":
            assert await own.grammar_for(GenerationOptions(regex="a"), tenant)
    finally:
        goes_on.set()
    assert await own.grammar_for(GenerationOptions(regex="a"), "mallory")
    own.close()


async def test_a_tenants_grammars_leave_those_of_others_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Counter[str]()
    compile_one = Grammars._compiled

    def counted(own: Grammars, option: str, text: str) -> Any:
        compiled[text] += 1
        return compile_one(own, option, text)

    monkeypatch.setattr(Grammars, "_compiled", counted)
    monkeypatch.setattr(grammar_jobs, "_MAX_KEPT", 8)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for tenant, regexes in (("a", ["a", "b"]), ("mallory", [f"m{number}" for number in range(20)]), ("a", ["a", "b"])):
        for regex in regexes:
            await own.grammar_for(GenerationOptions(regex=regex), tenant)
    assert compiled["a"] == compiled["b"] == 1
    large = [GenerationOptions(choices=[f"{number}".rjust(256)] * 250) for number in range(8)]  # half of what is kept
    for options in large:
        await own.grammar_for(options, "mallory")
    await own.grammar_for(GenerationOptions(regex="a"), "a")
    assert compiled["a"] == 1
    own.close()


async def test_a_text_tells_that_it_waits_for_its_grammar_and_no_longer(held: threading.Event) -> None:
    told = list[NewTokens]()
    async with _generator() as generator:
        sink: Any = SimpleNamespace(put=told.append)
        text = asyncio.create_task(generator.generate(_item([5], regex="slow"), sink))
        await happens(lambda: bool(told))
        assert await _texts(generator, _item([6], 3))
        held.set()
        await text
    assert [(one.is_waiting, not one.token_ids) for one in told[:3]] == [(True, True), (False, True), (False, False)]


async def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_MAX_KEPT", 2)
    compiled: list[str] = []
    compile_one = Grammars._compiled

    def counted(own: Grammars, option: str, text: str) -> Any:
        compiled.append(text)
        return compile_one(own, option, text)

    monkeypatch.setattr(Grammars, "_compiled", counted)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for regex in ("a", "b", "a", "c", "a", "b"):
        await own.grammar_for(GenerationOptions(regex=regex))
    assert compiled == ["a", "b", "c", "b"]
    monkeypatch.setattr(grammar_jobs, "_KEPT_S", 0)  # others have been used before
    for regex in ("b", "c", "b"):
        await own.grammar_for(GenerationOptions(regex=regex))
    assert compiled[4:] == ["c", "b"]
    own.close()


class _Compiled:
    """A grammar that tells when it is freed."""

    def __init__(self, freed_s: list[float]) -> None:
        self._freed_s = freed_s

    def deep_copy(self) -> str:
        return "a copy"

    def __del__(self) -> None:
        self._freed_s.append(time.monotonic())


async def test_grammars_that_are_no_longer_kept_are_freed_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_MAX_KEPT", 3)
    freed_s = list[float]()
    monkeypatch.setattr(Grammars, "_compiled", lambda *_: _Compiled(freed_s))
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for numbers in (range(3), range(3, 6)):  # the last three replace the first at once
        await asyncio.gather(*(own.grammar_for(GenerationOptions(regex=str(number))) for number in numbers))
    await happens(lambda: len(freed_s) == 3)
    assert min(later - earlier for earlier, later in pairwise(freed_s)) > grammar_jobs._FREES_EVERY_S / 2
    own.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("abc", 3),
        ("a{5}b", 6),
        ("(ab){3}c{2,4}", 10),
        (r"[a-z]{5}\d{3}", 8),
        ("((a{50}b){50}c){50}", 50_000),
        ("a)b{3}(c", 6),
        ("a{0}b{2,}", 3),
        ('{"pattern": "^a{10}$"}', 27),
    ],
)
def test_the_size_of_a_grammar_has_its_repetitions_written_out(text: str, size: int) -> None:
    assert grammar_jobs.written_out_size(text) == size


async def test_few_grammars_of_many_repetitions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_MAX_KEPT_CHARACTERS", 60_000)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    for number in range(16):
        await own.grammar_for(GenerationOptions(regex=f"a{{{9_000 + number}}}"), "mallory")
        await own.grammar_for(GenerationOptions(regex=f"a|b{{{number}}}"), "alice")
    large = [job for (tenant, *_), job in own._jobs._kept.items() if tenant == "mallory"]
    assert len(large) == 6, "as many as have the characters of all kept grammars"
    assert sum(tenant == "alice" for tenant, *_ in own._jobs._kept) == 16
    own.close()


async def test_a_grammar_is_freed_when_it_is_not_used_though_no_other_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "_KEPT_S", 0.05)
    own = Grammars(_SPEC, lambda: TOKENIZER_JSON)
    await own.grammar_for(GenerationOptions(regex="a"))
    assert own._jobs._kept
    await happens(lambda: not own._jobs._kept)
    await own.grammar_for(GenerationOptions(regex="a"))
    await happens(lambda: not own._jobs._kept)
    own.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "a{150000}"}, r"options.regex: cannot be followed: with its repetitions written out, it has more "),
        ({"regex": "(a{300}b){400}"}, r"options.regex: cannot be followed: with its repetitions written out"),
        (
            {"json_schema": '{"const": %s}' % ("1" * 5001)},
            "options.json_schema: cannot be followed: it has a number of 5001 digits, the limit is 4300",
        ),
    ],
)
async def test_a_grammar_that_is_too_large_is_refused_in_our_words(options: dict[str, Any], message: str) -> None:
    async with _generator() as generator:
        with pytest.raises(InvalidInput, match=message):
            await _texts(generator, _item([5], 8, **options))
