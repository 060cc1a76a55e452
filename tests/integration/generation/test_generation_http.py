"""Generated texts over HTTP, read by the clients that people have: they get what our own client gets."""

import json
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import openai
import pytest
import pytest_asyncio
import requests
import torch
import transformers

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import ChatMessage, FinishReason
from neuronpipe.client import Client
from tests.systems.http_server import HttpServer, running_http_server

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_PROMPT = "A module is a file"
_CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a module?"}]


@pytest.fixture(scope="module")
def server(writer_folder: Path) -> Iterator[HttpServer]:
    with running_http_server(writer_folder / "repository", "--metrics-listen", "127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def source(writer_folder: Path) -> Path:
    return writer_folder / "source"


@pytest.fixture(scope="module")
def ours(server: HttpServer) -> Iterator[Client]:
    with Client(server.process.target, timeout_s=120) as client:
        yield client


@pytest_asyncio.fixture
async def theirs(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_a_chat_is_answered_as_our_own_client_has_it(theirs: Any, ours: Client) -> None:
    answer = await theirs.chat.completions.create(model="writer", messages=_CHAT, max_tokens=12, user="somebody")
    expected = [*ours.generate("writer", messages=_CHAT, max_new_tokens=12)][-1].response
    (choice,) = answer.choices
    assert choice.message.content == expected.result.text_generation.sequences[0].text
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert answer.usage.prompt_tokens == expected.usage.tokens
    assert answer.usage.completion_tokens == expected.usage.generated_tokens == 12
    assert answer.usage.total_tokens == expected.usage.tokens + 12
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "writer")


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5}, {}),
        (
            # What clients send by default, or for the services of OpenAI.
            {
                "temperature": 0,
                "top_p": 1,
                "n": 1,
                "presence_penalty": 0.0,
                "frequency_penalty": 0,
                "logit_bias": {},
                "user": "somebody",
                "metadata": {"a": "b"},
                "store": False,
                "service_tier": "auto",
                "safety_identifier": "one",
                "prompt_cache_key": "two",
                "response_format": {"type": "text"},
                "parallel_tool_calls": True,
                "logprobs": False,
                "top_logprobs": 0,
                "extra_body": {"ignore_eos": False, "skip_special_tokens": True, "top_k": -1},
            },
            {},
        ),
        (
            {"temperature": 0.8, "top_p": 0.9, "seed": 7},
            {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 7},
        ),
        ({"seed": -1}, {"do_sample": True, "seed": (1 << 64) - 1}),
        (
            {"extra_body": {"repetition_penalty": 1.5, "min_tokens": 2}},
            {"repetition_penalty": 1.5, "min_new_tokens": 2},
        ),
    ],
    ids=str,
)
async def test_a_stream_has_the_text_of_the_whole_answer(
    theirs: Any, ours: Client, options: dict[str, Any], own: dict[str, Any]
) -> None:
    stream = await theirs.chat.completions.create(
        model="writer",
        messages=_CHAT,
        max_completion_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    first, *chunks, end, last = [chunk async for chunk in stream]
    expected = [*ours.generate("writer", messages=_CHAT, max_new_tokens=16, **own)][-1].response
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected.result.text_generation.sequences[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    assert end.choices[0].finish_reason in ("length", "stop")
    assert last.choices == []
    assert last.usage.completion_tokens == expected.usage.generated_tokens
    assert {chunk.usage for chunk in (first, *chunks, end)} == {None}
    assert len({chunk.id for chunk in (first, *chunks, end, last)}) == 1


async def test_completions_continue_texts(theirs: Any, ours: Client) -> None:
    answer = await theirs.completions.create(model="writer", prompt=[_PROMPT, "A class"], max_tokens=8)
    texts = [ours.generate_text("writer", prompt, max_new_tokens=8) for prompt in (_PROMPT, "A class")]
    assert [choice.text for choice in answer.choices] == [text.text for text in texts]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage.completion_tokens == sum(len(text.token_ids) for text in texts)
    stream = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=8, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    short = await theirs.completions.create(model="writer", prompt=_PROMPT)
    assert short.usage.completion_tokens <= 16


async def test_n_texts_are_choices(theirs: Any, ours: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "n": 2, "seed": 3, "temperature": 1.2}
    own: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.2}
    *_, last = ours.generate("writer", messages=_CHAT, seed=3, num_return_sequences=2, **own)
    texts = [sequence.text for sequence in last.response.result.text_generation.sequences]
    answer = await theirs.chat.completions.create(model="writer", messages=_CHAT, **options)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [*enumerate(texts)]
    stream = await theirs.chat.completions.create(model="writer", messages=_CHAT, stream=True, **options)
    read = ["", ""]
    ends: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            read[choice.index] += choice.delta.content or ""
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert (read, ends) == (texts, {0: "length", 1: "length"})
    several = await theirs.completions.create(model="writer", prompt=[_PROMPT, "A class"], **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError, match="n: must be 1 with a temperature of 0"):
        await theirs.completions.create(model="writer", prompt=_PROMPT, n=2, temperature=0)


@pytest.mark.parametrize("n", [1, 2])
async def test_several_prompts_in_one_stream_are_choices_in_their_order(theirs: Any, ours: Client, n: int) -> None:
    # So long that a reader who is late for the first parts is not late for all.
    prompts, long = [_PROMPT, "A class", "The tower"], {"max_tokens": 100, "extra_body": {"min_tokens": 100}}
    options: dict[str, Any] = {"seed": 3, "temperature": 1.2, "n": n, **long}
    own: dict[str, Any] = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": True, "temperature": 1.2}
    responses = [
        [*ours.generate("writer", prompt, seed=3, num_return_sequences=n, **own)][-1].response for prompt in prompts
    ]
    expected = [text.text for response in responses for text in response.result.text_generation.sequences]
    stream = await theirs.completions.create(
        model="writer", prompt=prompts, stream=True, stream_options={"include_usage": True}, **options
    )
    read, ends, order = [""] * len(expected), {}, []
    async for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            read[choice.index] += choice.text
            order.append(choice.index)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert read == expected
    assert ends == dict.fromkeys(range(len(expected)), "length")
    assert order != sorted(order), "texts did not come side by side"
    assert (last.choices, last.usage.completion_tokens) == ([], 100 * len(expected))


async def test_echo_puts_the_prompt_before_each_text(theirs: Any, ours: Client) -> None:
    prompts = [_PROMPT, "A class"]
    expected = [prompt + ours.generate_text("writer", prompt, max_new_tokens=6).text for prompt in prompts]
    options: dict[str, Any] = {"model": "writer", "prompt": prompts, "max_tokens": 6, "echo": True, "best_of": 1}
    answer = await theirs.completions.create(**options)
    assert [choice.text for choice in answer.choices] == expected
    read = ["", ""]
    async for chunk in await theirs.completions.create(stream=True, **options):
        read[chunk.choices[0].index] += chunk.choices[0].text
    assert read == expected


async def test_the_text_of_a_beam_search_comes_as_one_part(theirs: Any, ours: Client) -> None:
    events = [*ours.generate("writer", _PROMPT, max_new_tokens=8, num_beams=3, length_penalty=2.0)]
    expected = events[-1].response.result.text_generation.sequences[0]
    extra = {"num_beams": 3, "length_penalty": 2.0}
    options: dict[str, Any] = {"model": "writer", "prompt": _PROMPT, "max_tokens": 8, "extra_body": extra}
    answer = await theirs.completions.create(temperature=0, **options)
    assert answer.choices[0].text == expected.text
    stream = await theirs.completions.create(stream=True, **options)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected.text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": [1, 100_000]}, "prompt"),
        ({"prompt": [[1, 2], [-3]]}, "prompt[1][0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [_PROMPT, ""]}, "prompt[1]"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": [1, 2], "echo": True}, "echo"),
        ({"echo": True, "logprobs": 1, "stop": "a"}, "echo"),
        ({"echo": True, "logprobs": 1, "n": 2}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"num_beams": 2}, "seed": 1}, "seed"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
    ],
    ids=str,
)
async def test_completions_name_what_they_refuse(
    theirs: Any, options: dict[str, Any], param: str, is_stream: bool
) -> None:
    given: dict[str, Any] = {"model": "writer", "prompt": _PROMPT} | options
    with pytest.raises(openai.BadRequestError) as refused:
        await theirs.completions.create(stream=is_stream, **given)
    assert refused.value.param == param
    for word in ("do_sample", "max_new_tokens", "num_return_sequences", "options"):
        assert word not in refused.value.message


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ({"messages": _CHAT, "max_tokens": 4}, "[DONE]"),
        ({"prompt": _PROMPT, "max_tokens": 4}, "[DONE]"),
        ({"inputs": _PROMPT, "parameters": {"max_new_tokens": 4}}, '"generated_text":"'),
    ],
    ids=str,
)
def test_sagemakers_path_streams_where_the_body_asks_for_it(
    server: HttpServer, body: dict[str, Any], last: str
) -> None:
    answer = requests.post(f"{server.url}/invocations", json=body | {"stream": True}, timeout=60)
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [line for line in answer.text.splitlines() if line.startswith("data:")]
    assert len(events) >= 4
    assert last in events[-1]


async def test_ids_of_tokens_come_with_whole_texts_and_with_their_parts(theirs: Any, ours: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    chat: dict[str, Any] = {"model": "writer", "messages": _CHAT}
    whole = (await theirs.chat.completions.create(**chat, **options)).choices[0].model_extra
    assert len(whole["token_ids"]) == 6
    expected = [*ours.generate("writer", messages=_CHAT, max_new_tokens=6, min_new_tokens=6)][-1].response
    assert whole["token_ids"] == [*expected.result.text_generation.sequences[0].token_ids]
    stream = await theirs.chat.completions.create(stream=True, **chat, **options)
    parts = [chunk.choices[0].model_extra.get("token_ids", []) async for chunk in stream if chunk.choices]
    assert [token_id for part in parts for token_id in part] == whole["token_ids"]
    completion = await theirs.completions.create(model="writer", prompt=_PROMPT, **options)
    assert len(completion.choices[0].token_ids) == 6


@pytest.mark.parametrize("is_chat", [False, True])
async def test_special_tokens_are_in_the_text_and_its_parts_where_a_caller_wants_them(
    theirs: Any, ours: Client, source: Path, is_chat: bool
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    special = next(id for id in tokenizer.all_special_ids if id != tokenizer.eos_token_id)
    options: dict[str, Any] = {"model": "writer", "max_tokens": 3, "logit_bias": {str(special): 100}, "temperature": 0}
    given = {"messages": _CHAT} if is_chat else {"prompt": _PROMPT}
    door = theirs.chat.completions if is_chat else theirs.completions
    for skips in (True, False):
        asked = {**options, **given, "extra_body": {"skip_special_tokens": skips, "return_token_ids": True}}
        (choice,) = (await door.create(**asked)).choices
        expected = tokenizer.decode(choice.token_ids, skip_special_tokens=skips)
        assert bool(expected) != skips
        assert (choice.message.content if is_chat else choice.text) == expected
        parts = [part.choices[0] async for part in await door.create(stream=True, **asked) if part.choices]
        texts = [part.delta.content if is_chat else part.text for part in parts]
        assert "".join(filter(None, texts)) == expected
    text = ours.generate_text("writer", prompt=_PROMPT, skip_special_tokens=False, logit_bias={special: 100})
    assert tokenizer.decode([special]) in text.text


async def test_log_probabilities_have_openais_forms(theirs: Any, ours: Client) -> None:
    expected = ours.generate("writer", messages=_CHAT, max_new_tokens=6, top_logprobs=2)
    tokens = [*expected][-1].response.result.text_generation.sequences[0].logprobs
    options: dict[str, Any] = {"model": "writer", "messages": _CHAT, "max_tokens": 6, "logprobs": True}
    answer = await theirs.chat.completions.create(top_logprobs=2, **options)
    found = answer.choices[0].logprobs.content
    assert [(entry.bytes, entry.logprob) for entry in found] == [
        ([*token.utf8], pytest.approx(token.logprob)) for token in tokens
    ]
    assert [[top.bytes for top in entry.top_logprobs] for entry in found] == [
        [[*top.utf8] for top in token.top] for token in tokens
    ]
    stream = await theirs.chat.completions.create(top_logprobs=2, stream=True, **options)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [entry for part in parts if part for entry in part.content] == found
    completion = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=6, logprobs=2)
    lists = completion.choices[0].logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == 6
    assert lists.text_offset[0] == 0


async def test_bytes_and_offsets_of_tokens_are_those_of_the_running_text(theirs: Any) -> None:
    asked: dict[str, Any] = {"model": "writer", "prompt": _PROMPT, "max_tokens": 60, "temperature": 2.0, "top_p": 1}
    has_parts_of_characters = False
    for seed in range(6):
        choice = (await theirs.completions.create(logprobs=20, seed=seed, **asked)).choices[0]
        lists = choice.logprobs
        for drawn, top in zip(lists.token_logprobs, lists.top_logprobs, strict=True):
            best = sorted(top.values(), reverse=True)[:20]
            assert len(best) == 20, "two tokens have one entry"
            assert len(top) == 20 + (drawn < best[-1]), "the drawn token is there in any case, and no other"
        spelled = b"".join(map(_bytes_of, lists.tokens))
        assert spelled.decode(errors="replace") == choice.text
        for place, offset in enumerate(lists.text_offset):
            before = b"".join(map(_bytes_of, lists.tokens[:place]))
            assert offset == len(getincrementaldecoder("utf-8")(errors="replace").decode(before))
        has_parts_of_characters |= any(token.startswith("bytes:") for token in lists.tokens)
        stream = await theirs.completions.create(logprobs=20, seed=seed, stream=True, **asked)
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        assert [offset for part in parts if part for offset in part.text_offset] == lists.text_offset
    assert has_parts_of_characters
    chat = await theirs.chat.completions.create(
        model="writer", messages=_CHAT, max_tokens=60, temperature=2.0, seed=3, logprobs=True, top_logprobs=20
    )
    tokens = chat.choices[0].logprobs.content
    said = b"".join(bytes(token.bytes) for token in tokens)
    assert said.decode(errors="replace") == chat.choices[0].message.content
    assert all(bytes(token.bytes) == _bytes_of(token.token) for token in tokens)


def _bytes_of(token: str) -> bytes:
    return bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()


async def test_token_ids_are_prompts_and_an_echo_has_the_log_probabilities_of_the_prompt(
    theirs: Any, source: Path
) -> None:
    """As lm-evaluation-harness asks for them: its loglikelihood is the sum of those behind the context."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source).float().eval()
    prompts = [tokenizer(text)["input_ids"] for text in (_PROMPT, "A class has 😀 methods " * 4)]
    asked: dict[str, Any] = {"model": "writer", "max_tokens": 1, "temperature": 0, "logprobs": 3, "echo": True}
    answer = await theirs.completions.create(prompt=prompts, **asked)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        lists = choice.logprobs
        assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        wanted = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=False)]
        assert lists.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-3)
        assert lists.token_logprobs[-1] == pytest.approx(float(expected[-1].max()), abs=1e-3)
        for row, own, top in zip(expected, lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True):
            best, others = sorted(top.values(), reverse=True)[:3], sorted(top.values(), reverse=True)[3:]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
            assert others == ([] if own in best else [own])
        assert choice.text.startswith(tokenizer.decode(prompt, skip_special_tokens=True))
    scored = await theirs.completions.create(prompt=prompts, **asked | {"max_tokens": 0})
    assert scored.usage.completion_tokens == 0
    for prompt, choice, whole in zip(prompts, scored.choices, answer.choices, strict=True):
        assert choice.logprobs.token_logprobs == whole.logprobs.token_logprobs[:-1]
        assert (choice.text, choice.finish_reason) == (tokenizer.decode(prompt, skip_special_tokens=True), "length")
    plain = await theirs.completions.create(model="writer", prompt=prompts, max_tokens=9)
    texts = await theirs.completions.create(model="writer", prompt=[_PROMPT], max_tokens=9)
    assert plain.choices[0].text == texts.choices[0].text
    assert plain.usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.001}, {"temperature": 1e-8}, {"top_p": 0}, {"stop": ""}, {"stop": ["", ""]}], ids=str
)
async def test_options_at_their_ends_give_the_most_probable_text(
    theirs: Any, ours: Client, options: dict[str, Any]
) -> None:
    answer = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=12, **options)
    assert answer.choices[0].text == ours.generate_text("writer", _PROMPT, max_new_tokens=12).text


async def test_biases_and_penalties_change_the_text(theirs: Any, source: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    (token,) = tokenizer("e", add_special_tokens=False)["input_ids"]
    asked: dict[str, Any] = {"model": "writer", "prompt": _PROMPT, "max_tokens": 12}
    forced = await theirs.completions.create(logit_bias={str(token): 100}, **asked)
    assert forced.choices[0].text == "e" * 12
    penalized = await theirs.completions.create(
        logit_bias={str(token): 100}, frequency_penalty=2, presence_penalty=2, logprobs=0, **asked
    )
    assert penalized.choices[0].text == "e" * 12, "100 is more than 12 * 2 + 2"
    free = await theirs.completions.create(frequency_penalty=2, presence_penalty=2, logprobs=0, **asked)
    assert len(set(free.choices[0].logprobs.tokens)) == 12


async def test_a_message_is_continued_and_the_template_gets_variables(theirs: Any, ours: Client) -> None:
    begun = [*_CHAT, {"role": "assistant", "content": "A module"}]

    async def text(messages: list[Any], **further: Any) -> str:
        options: dict[str, Any] = {"model": "writer", "messages": messages, "max_tokens": 8, "extra_body": further}
        return str((await theirs.chat.completions.create(**options)).choices[0].message.content)

    # By the template of tests/models/decoders.py.
    request = InferRequest(model="writer")
    request.input.text_generation.options.max_new_tokens = 8
    request.input.text_generation.messages.extend(ChatMessage(**message) for message in begun)
    request.input.text_generation.continue_final_message = True
    expected = ours.infer(request).result.text_generation.sequences[0].text
    assert await text(begun, continue_final_message=True, add_generation_prompt=False) == expected
    assert await text(begun, continue_final_message=True) == expected
    assert await text(begun) != expected
    without = await text(_CHAT, add_generation_prompt=False)
    assert without == await text(_CHAT, chat_template_kwargs={"add_generation_prompt": False}) != await text(_CHAT)


@pytest.mark.parametrize("n", [1, 2])
async def test_chunks_tell_the_tokens_so_far(theirs: Any, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await theirs.chat.completions.create(
        model="writer", messages=_CHAT, max_tokens=8, n=n, seed=1, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    for index in range(n):
        own = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        used = [chunk.usage for chunk in own]
        counts = [use.completion_tokens for use in used if use]
        assert (len(counts), counts[0], counts[-1], counts) == (len(own), 0, 8, sorted(counts))
        # A part may have several tokens, as a slow reader gets them together; but each has some.
        of_texts = [counts[number] for number, chunk in enumerate(own) if chunk.choices[0].delta.content]
        assert len(set(of_texts)) >= len(of_texts) - 1
        assert of_texts[0]
        assert {use.prompt_tokens for use in used[1:] if use} == {chunks[-1].usage.prompt_tokens}
    assert chunks[-1].usage.completion_tokens == 8 * n


async def test_a_stop_string_ends_both_forms(theirs: Any, ours: Client) -> None:
    whole = ours.generate_text("writer", _PROMPT, max_new_tokens=24).text
    stop = whole[len(whole) // 2 :][:3]
    answer = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=24, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    stream = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=24, stop=[stop], stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.text for choice in choices) == answer.choices[0].text
    # vLLM's field, which OpenAI's client keeps.
    reasons = [choice.model_extra.get("stop_reason") for choice in (answer.choices[0], choices[-1], choices[0])]
    assert reasons == [stop, stop, None]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 400}, "max_tokens"),
        ({"max_completion_tokens": 400}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"continue_final_message": True, "add_generation_prompt": True}}, "continue_final_message"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"function_call": {"name": "look"}}, "function_call"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "x"}}]}, "messages[0].function_call"),
        ({"temperature": 200}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
    ],
    ids=str,
)
async def test_what_is_refused_has_openais_form(
    theirs: Any, options: dict[str, Any], param: str, is_stream: bool
) -> None:
    given: dict[str, Any] = {"model": "writer", "messages": _CHAT} | options
    with pytest.raises(openai.BadRequestError) as refused:
        await theirs.chat.completions.create(stream=is_stream, **given)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_events_are_as_the_standard_has_them(server: HttpServer) -> None:
    body = {"model": "writer", "prompt": _PROMPT, "max_tokens": 4, "stream": True}
    answer = requests.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "mine"}, timeout=60)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("path", ["/generate_stream", "/models/writer", "/", "/generate"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 20, "seed": 5}, {"stop": ["e"]}], ids=str)
def test_huggingfaces_client_gets_the_text_of_our_own(
    server: HttpServer, ours: Client, path: str, options: dict[str, Any]
) -> None:
    own = {"stop_strings" if name == "stop" else name: value for name, value in options.items()}
    own |= {"do_sample": True} if "seed" in options else {}
    expected = ours.generate_text("writer", _PROMPT, max_new_tokens=12, **own)
    client = huggingface_hub.InferenceClient(model=f"{server.url}{path}", timeout=60)
    if path != "/generate_stream":
        assert client.text_generation(_PROMPT, max_new_tokens=12, **options) == expected.text
        full = client.text_generation(_PROMPT, max_new_tokens=12, return_full_text=True, details=True, **options)
        assert full.generated_text == _PROMPT + expected.text
        assert full.details
        assert full.details.generated_tokens == len(expected.token_ids)
        assert [token.id for token in full.details.tokens] == list(expected.token_ids)
    if path != "/generate":
        parts = list(client.text_generation(_PROMPT, max_new_tokens=12, stream=True, details=True, **options))
        assert "".join(part.token.text for part in parts) == expected.text
        assert [part.token.id for part in parts] == list(expected.token_ids)
        assert [part.index for part in parts] == [*range(1, len(parts) + 1)]
        assert [part.generated_text for part in parts] == [None] * (len(parts) - 1) + [expected.text]
        assert [part.details is None for part in parts] == [True] * (len(parts) - 1) + [False]
        assert parts[-1].details
        assert parts[-1].details.generated_tokens == len(expected.token_ids)
        assert parts[-1].details.seed == options.get("seed")
        assert all(part.token.logprob < 0 for part in parts)
        assert parts[-1].details.finish_reason == ("stop_sequence" if "stop" in options else "length")


def test_tokens_of_a_stream_have_their_log_probabilities_without_being_asked_for(
    server: HttpServer, ours: Client
) -> None:
    response = [*ours.generate("writer", _PROMPT, max_new_tokens=6, top_logprobs=0)][-1].response
    (expected,) = response.result.text_generation.sequences
    body = {"inputs": _PROMPT, "parameters": {"max_new_tokens": 6}}
    given = [event["token"]["logprob"] for event in _events(server, "/generate_stream", body)]
    assert given == pytest.approx([logprob.logprob for logprob in expected.logprobs], abs=1e-6)


def test_a_seed_alone_draws_no_tokens(server: HttpServer, ours: Client) -> None:
    expected = ours.generate_text("writer", _PROMPT, max_new_tokens=12)
    body = {"inputs": _PROMPT, "parameters": {"max_new_tokens": 12, "seed": 5}}
    (*_, last) = _events(server, "/generate_stream", body)
    assert (last["generated_text"], last["details"]["seed"]) == (expected.text, None)


def test_hugging_faces_client_chats_with_the_address_of_a_model(server: HttpServer, ours: Client) -> None:
    client = huggingface_hub.InferenceClient(model=f"{server.url}/models/writer", timeout=60)
    expected = ours.generate_text("writer", messages=_CHAT, max_new_tokens=12).text
    assert client.chat_completion(_CHAT, max_tokens=12).choices[0].message.content == expected
    chunks = client.chat_completion(_CHAT, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


def _events(server: HttpServer, path: str, body: dict[str, Any]) -> list[Any]:
    answer = requests.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-1]]


def test_what_tgi_refuses_has_its_form(server: HttpServer) -> None:
    client = huggingface_hub.InferenceClient(model=f"{server.url}/generate_stream", timeout=60)
    for options in ({"max_new_tokens": 400}, {"watermark": True}, {"top_p": 2.0}):
        with pytest.raises(huggingface_hub.errors.ValidationError, match=rf"^parameters\.{next(iter(options))}: "):
            list(client.text_generation(_PROMPT, stream=True, **options))


def _read_by_triton(server: HttpServer, parameters: dict[str, Any]) -> Any:
    program = [sys.executable, "-m", "tests.callers.triton_stream", server.process.target, "writer", _PROMPT]
    done = subprocess.run([*program, json.dumps(parameters)], capture_output=True, timeout=120, check=True)
    return json.loads(done.stdout)


def test_tritons_client_gets_several_texts_and_log_probabilities(server: HttpServer, ours: Client) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "seed": 11}
    *_, last = ours.generate("writer", _PROMPT, **sampling, num_return_sequences=2)
    texts = [sequence.text for sequence in last.response.result.text_generation.sequences]
    assert texts[0] == ours.generate_text("writer", _PROMPT, **sampling).text
    (whole,) = _read_by_triton(server, sampling | {"num_return_sequences": 2})["responses"]
    assert whole["tensors"]["text"] == [texts]
    events = [*ours.generate("writer", _PROMPT, max_new_tokens=6, top_logprobs=2)]
    tokens = events[-1].response.result.text_generation.sequences[0].logprobs
    for is_stream in (False, True):
        given = {"max_new_tokens": 6, "top_logprobs": 2, "stream": is_stream}
        found = [response["tensors"] for response in _read_by_triton(server, given)["responses"]]
        logprobs = [value for answer in found for value in answer["logprobs"][0][0]]
        assert logprobs == pytest.approx([token.logprob for token in tokens])
        ids = [top for answer in found for top in answer["top_token_ids"][0][0]]
        assert ids == [[top.token_id for top in token.top] for token in tokens]


def test_tritons_client_reads_a_text_as_it_comes(server: HttpServer, ours: Client) -> None:
    parameters = {"stream": True, "max_new_tokens": 150, "do_sample": True, "temperature": 0.9, "seed": 11}
    answer = _read_by_triton(server, parameters)
    expected = ours.generate_text("writer", _PROMPT, max_new_tokens=150, do_sample=True, temperature=0.9, seed=11)
    *parts, last = answer["responses"]
    assert answer["is_decoupled"]
    assert len(parts) > 1
    assert "".join(part["text"] for part in parts) == expected.text
    assert [token for part in parts for token in part["token_ids"]] == list(expected.token_ids)
    assert {part["reason"] for part in parts} == {0}
    assert last.pop("tensors") == {"text": [[""]], "logprobs": [[[]]], "top_token_ids": [[[]]]}
    assert last == {"id": "mine", "text": "", "token_ids": [], "reason": FinishReason.FINISH_REASON_LENGTH}
    (whole,) = _read_by_triton(server, parameters | {"stream": False})["responses"]
    assert (whole["text"], whole["token_ids"]) == (expected.text, list(expected.token_ids))
    (refused,) = _read_by_triton(server, {"stream": True, "temperature": -1.0, "do_sample": True})["responses"]
    assert "temperature" in refused["error"]


def test_the_messages_of_generate_are_events(server: HttpServer, ours: Client) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "seed": "7", "top_logprobs": 1}
    input = {"text_generation": {"prompt": _PROMPT, "options": options}}
    start, *chunks, last = _events(server, "/v1/generate", {"model": "writer", "input": input, "request_id": "mine"})
    *_, end = ours.generate("writer", _PROMPT, max_new_tokens=12, do_sample=True, seed=7, top_logprobs=1)
    expected = end.response.result.text_generation.sequences[0]
    assert start["start"].pop("prompt_tokens")
    assert start["start"] == {"model": "writer", "version": "1", "request_id": "mine"}
    assert "".join(chunk["chunk"]["text"] for chunk in chunks) == expected.text
    assert [token for chunk in chunks for token in chunk["chunk"]["token_ids"]] == list(expected.token_ids)
    assert sum(len(chunk["chunk"]["logprobs"]) for chunk in chunks) == 12
    (whole,) = last["response"]["result"]["text_generation"]["sequences"]
    assert (whole["text"], last["response"]["request_id"]) == (expected.text, "mine")
    assert last["response"]["usage"]["generated_tokens"] == 12


async def test_a_response_is_read_by_openais_client(theirs: Any, ours: Client) -> None:
    expected = [*ours.generate("writer", messages=_CHAT, max_new_tokens=12)][-1].response
    text = expected.result.text_generation.sequences[0].text
    asked: dict[str, Any] = {"input": _CHAT[1]["content"], "instructions": "Be brief.", "max_output_tokens": 12}
    answer = await theirs.responses.create(model="writer", **asked)
    assert (answer.output_text, answer.status) == (text, "incomplete")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected.usage.tokens, 12)
    said = {name: asked[name] for name in ("input", "instructions")}
    counted = await theirs.responses.input_tokens.count(model="writer", **said)
    assert (counted.input_tokens, counted.object) == (expected.usage.tokens, "response.input_tokens")
    async with theirs.responses.stream(model="writer", **asked) as stream:
        events = [event async for event in stream]
        whole = await stream.get_final_response() if events[-1].type == "response.completed" else events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert (whole.output_text, whole.usage) == (text, answer.usage)
