"""Generated texts over HTTP, read by the clients that people have: they get what our own client gets."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import openai
import pytest
import pytest_asyncio

from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.client import Client
from tests.decoders import make_writer
from tests.integration.http_server import HttpServer, running_http_server
from tests.shared_folder import shared_folder

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_PROMPT = "A module is a file"
_CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a module?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    repository: Path = shared_folder(tmp_path_factory, "writer", make_writer) / "repository"
    with running_http_server(repository, "--metrics-listen", "127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def ours(server: HttpServer) -> Iterator[Client]:
    with Client(server.process.target, timeout_s=120) as client:
        yield client


@pytest_asyncio.fixture
async def theirs(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_a_chat_is_answered_as_our_own_client_has_it(theirs: openai.AsyncOpenAI, ours: Client) -> None:
    answer = await theirs.chat.completions.create(model="writer", messages=_CHAT, max_tokens=12, user="somebody")
    expected = [*ours.generate("writer", messages=_CHAT, max_new_tokens=12)][-1].response
    (choice,) = answer.choices
    assert choice.message.content == expected.result.text_generation.sequences[0].text
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert answer.usage
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
    theirs: openai.AsyncOpenAI, ours: Client, options: dict[str, Any], own: dict[str, Any]
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
    assert last.usage
    assert last.usage.completion_tokens == expected.usage.generated_tokens
    assert {chunk.usage for chunk in (first, *chunks, end)} == {None}
    assert len({chunk.id for chunk in (first, *chunks, end, last)}) == 1


async def test_completions_continue_texts(theirs: openai.AsyncOpenAI, ours: Client) -> None:
    answer = await theirs.completions.create(model="writer", prompt=[_PROMPT, "A class"], max_tokens=8)
    texts = [ours.generate_text("writer", prompt, max_new_tokens=8) for prompt in (_PROMPT, "A class")]
    assert [one.text for one in answer.choices] == [one.text for one in texts]
    assert [one.index for one in answer.choices] == [0, 1]
    assert answer.usage
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in texts)
    stream = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=8, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == texts[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    short = await theirs.completions.create(model="writer", prompt=_PROMPT)
    assert short.usage
    assert short.usage.completion_tokens <= 16


async def test_n_texts_are_choices(theirs: openai.AsyncOpenAI, ours: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "n": 2, "seed": 3, "temperature": 1.2}
    own: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.2}
    *_, last = ours.generate("writer", messages=_CHAT, seed=3, num_return_sequences=2, **own)
    texts = [one.text for one in last.response.result.text_generation.sequences]
    answer = await theirs.chat.completions.create(model="writer", messages=_CHAT, **options)
    assert [(one.index, one.message.content) for one in answer.choices] == [*enumerate(texts)]
    stream = await theirs.chat.completions.create(model="writer", messages=_CHAT, stream=True, **options)
    read = ["", ""]
    ends: dict[int, str] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            read[choice.index] += choice.delta.content or ""
            ends |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert (read, ends) == (texts, {0: "length", 1: "length"})
    several = await theirs.completions.create(model="writer", prompt=[_PROMPT, "A class"], **options)
    assert [one.index for one in several.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.BadRequestError, match="n: "):
        await theirs.completions.create(model="writer", prompt=_PROMPT, n=2, temperature=0)


async def test_log_probabilities_have_openais_forms(theirs: openai.AsyncOpenAI, ours: Client) -> None:
    expected = ours.generate("writer", messages=_CHAT, max_new_tokens=6, top_logprobs=2)
    tokens = [*expected][-1].response.result.text_generation.sequences[0].logprobs
    options: dict[str, Any] = {"model": "writer", "messages": _CHAT, "max_tokens": 6, "logprobs": True}
    answer = await theirs.chat.completions.create(top_logprobs=2, **options)
    assert answer.choices[0].logprobs
    found = answer.choices[0].logprobs.content or []
    assert [(one.token, one.logprob) for one in found] == [(one.text, pytest.approx(one.logprob)) for one in tokens]
    assert [[top.token for top in one.top_logprobs] for one in found] == [
        [top.text for top in one.top] for one in tokens
    ]
    stream = await theirs.chat.completions.create(top_logprobs=2, stream=True, **options)
    parts = [chunk.choices[0].logprobs async for chunk in stream]
    assert [one for part in parts if part for one in part.content or ()] == found
    completion = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=6, logprobs=2)
    lists = completion.choices[0].logprobs
    assert lists
    assert len(lists.tokens or ()) == len(lists.token_logprobs or ()) == len(lists.top_logprobs or ()) == 6
    assert (lists.text_offset or [None])[0] == 0


async def test_a_stop_string_ends_both_forms(theirs: openai.AsyncOpenAI, ours: Client) -> None:
    whole = ours.generate_text("writer", _PROMPT, max_new_tokens=24).text
    stop = whole[len(whole) // 2 :][:3]
    answer = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=24, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    stream = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=24, stop=[stop], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 400}, "max_tokens"),
        ({"temperature": 200}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ],
    ids=str,
)
async def test_what_is_refused_has_openais_form(
    theirs: openai.AsyncOpenAI, options: dict[str, Any], param: str, is_stream: bool
) -> None:
    given: dict[str, Any] = {"model": "writer", "messages": _CHAT} | options
    with pytest.raises(openai.BadRequestError) as refused:
        await theirs.chat.completions.create(stream=is_stream, **given)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


async def test_a_model_that_is_not_there_is_not_found(theirs: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await theirs.chat.completions.create(model="nobody", messages=_CHAT, stream=True)


async def test_a_caller_that_leaves_a_stream_frees_its_blocks(server: HttpServer, theirs: openai.AsyncOpenAI) -> None:
    stream = await theirs.completions.create(model="writer", prompt=_PROMPT, max_tokens=170, stream=True)
    async for _ in stream:
        break
    await stream.close()
    port = server.process.wait_for("metrics")["address"]
    async with asyncio.timeout(60):
        while _in_use(port):
            await asyncio.sleep(0.05)


def _in_use(address: Any) -> float:
    page = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    (line,) = (line for line in page.splitlines() if line.startswith("neuronpipe_generation_blocks_in_use"))
    return float(line.rpartition(" ")[2])


def test_events_are_as_the_standard_has_them(server: HttpServer) -> None:
    body = json.dumps({"model": "writer", "prompt": _PROMPT, "max_tokens": 4, "stream": True}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"content-type": "application/json", "x-request-id": "mine"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        events = answer.read().decode().split("\n\n")
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
        assert [part.token.id for part in parts[:-1]] == list(expected.token_ids)
        assert [part.generated_text for part in parts] == [None] * len(expected.token_ids) + [expected.text]
        assert parts[-1].details
        assert parts[-1].details.generated_tokens == len(expected.token_ids)
        assert all(part.token.logprob < 0 for part in parts[:-1])
        assert parts[-1].details.finish_reason == ("stop_sequence" if "stop" in options else "length")


def test_what_tgi_refuses_has_its_form(server: HttpServer) -> None:
    client = huggingface_hub.InferenceClient(model=f"{server.url}/generate_stream", timeout=60)
    for options in ({"max_new_tokens": 400}, {"watermark": True}, {"truncate": 5}, {"top_p": 2.0}):
        with pytest.raises(huggingface_hub.errors.ValidationError, match=rf"^parameters\.{next(iter(options))}: "):
            list(client.text_generation(_PROMPT, stream=True, **options))


def test_tritons_client_reads_a_text_as_it_comes(server: HttpServer, ours: Client) -> None:
    def read(parameters: dict[str, Any]) -> Any:
        program = [sys.executable, "-m", "tests.integration.triton_stream", server.process.target, "writer", _PROMPT]
        done = subprocess.run([*program, json.dumps(parameters)], capture_output=True, timeout=120, check=True)
        return json.loads(done.stdout)

    parameters = {"stream": True, "max_new_tokens": 12, "do_sample": True, "temperature": 0.9, "seed": 11}
    answer = read(parameters)
    expected = ours.generate_text("writer", _PROMPT, max_new_tokens=12, do_sample=True, temperature=0.9, seed=11)
    *parts, last = answer["responses"]
    assert answer["is_decoupled"]
    assert len(parts) > 1
    assert "".join(part["text"] for part in parts) == expected.text
    assert [token for part in parts for token in part["token_ids"]] == list(expected.token_ids)
    assert {part["reason"] for part in parts} == {0}
    assert last == {"id": "mine", "text": "", "token_ids": [], "reason": FinishReason.FINISH_REASON_LENGTH}
    (whole,) = read(parameters | {"stream": False})["responses"]
    assert (whole["text"], whole["token_ids"]) == (expected.text, list(expected.token_ids))
    (refused,) = read({"stream": True, "temperature": -1.0, "do_sample": True})["responses"]
    assert "temperature" in refused["error"]


def _post(server: HttpServer, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        f"{server.url}/v1/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_messages_of_generate_are_events(server: HttpServer, ours: Client) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "seed": "7", "top_logprobs": 1}
    input = {"text_generation": {"prompt": _PROMPT, "options": options}}
    status, text = _post(server, {"model": "writer", "input": input, "request_id": "mine"})
    assert status == 200
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]
    start, *chunks, last = events
    response = [*ours.generate("writer", _PROMPT, max_new_tokens=12, do_sample=True, seed=7, top_logprobs=1)][
        -1
    ].response
    expected = response.result.text_generation.sequences[0]
    assert start["start"] | {"prompt_tokens": 0} == {
        "model": "writer",
        "version": "1",
        "request_id": "mine",
        "prompt_tokens": 0,
    }
    assert "".join(one["chunk"]["text"] for one in chunks) == expected.text
    assert [token for one in chunks for token in one["chunk"]["token_ids"]] == list(expected.token_ids)
    assert sum(len(one["chunk"]["logprobs"]) for one in chunks) == 12
    (whole,) = last["response"]["result"]["text_generation"]["sequences"]
    assert (whole["text"], last["response"]["request_id"]) == (expected.text, "mine")
    assert last["response"]["usage"]["generated_tokens"] == 12


def test_what_is_wrong_before_the_first_part_has_a_status(server: HttpServer) -> None:
    status, text = _post(server, {"model": "writer", "input": {"text_generation": {"prompt": ""}}})
    assert status == 400
    assert json.loads(text)["reason"] == "INVALID_INPUT"
    status, text = _post(server, {"model": "writer", "input": {"text_classification": {"text": "a"}}})
    assert status == 400
    assert "must be of a task that generates: text_generation, summarization, translation" in text
    assert _post(server, {"model": "none", "input": {"text_generation": {"prompt": "a"}}})[0] == 404
