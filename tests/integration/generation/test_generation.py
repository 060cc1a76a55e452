"""Text generation behaves the same in one process and in four: streams, ends, leaves and refuses."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import h2.events
import pytest
import pytest_asyncio
import torch
import transformers

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import GenerateResponse, InferRequest
from neuronpipe.api.v1.tasks_pb2 import FinishReason, TaskInput, TokenizationInput, Truncation
from neuronpipe.client import AsyncClient, Client, DeadlineExceeded, InvalidInput, Overloaded, Unavailable, WrongTask
from neuronpipe.client.task_call import generation_request
from tests.callers.metrics import metric
from tests.callers.raw_http2 import RawHttp2
from tests.suite.constants import constants
from tests.suite.waiting import happens, until
from tests.systems.pipelines import two_processes

pytestmark = pytest.mark.local_only

_PROMPT = "A module is a file"
# Twice as many as the executor runs in a step.
_MANY = 64
# `make soak` sends 10,000.
_SOAKED = int(os.environ.get("NEURONPIPE_GENERATIONS", "60"))
_METRICS = ("--metrics-listen", "127.0.0.1:0")
_GENERATE = "/neuronpipe.api.v1.InferenceService/Generate"


@pytest.fixture(scope="module")
def repository(writer_folder: Path) -> Path:
    return writer_folder / "repository"


@pytest.fixture(scope="module")
def processes(repository: Path) -> Iterator[dict[str, dict[str, ServiceProcess]]]:
    with four_processes(repository, *_METRICS) as four, ServiceProcess("all", "--repository", str(repository)) as solo:
        yield {"four processes": four, "one process": {"gateway": solo.wait_until_ready()}}


@pytest_asyncio.fixture(scope="module", params=["four processes", "one process"])
async def client(
    request: pytest.FixtureRequest, processes: dict[str, dict[str, ServiceProcess]]
) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(processes[request.param]["gateway"].target, timeout_s=120, retries=False) as client:
        yield client


async def _generate(client: AsyncClient, **options: Any) -> list[GenerateResponse]:
    return [event async for event in client.generate("writer", _PROMPT, **options)]


def _request(**options: Any) -> InferRequest:
    return generation_request("text_generation", "writer", {"prompt": _PROMPT}, options)


async def test_chunks_are_the_text_that_infer_returns(client: AsyncClient) -> None:
    events = await _generate(client, max_new_tokens=150)
    start, *chunks, last = events
    text = last.response.result.text_generation.sequences[0]
    assert (start.start.model, start.start.version) == ("writer", "1")
    assert start.start.request_id == last.response.request_id
    assert "".join(event.chunk.text for event in chunks) == text.text
    assert [token for event in chunks for token in event.chunk.token_ids] == list(text.token_ids)
    assert len(chunks) > 1
    assert len(text.token_ids) == 150
    assert text.finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert (await client.infer(_request(max_new_tokens=150))).result == last.response.result


def _said(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


_CHAT = [_said("Be brief.", "system"), _said("What is a module?</s>")]


async def test_messages_are_what_their_template_makes_of_them(client: AsyncClient, repository: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(repository.parent / "source")
    ids = tokenizer.apply_chat_template(
        _CHAT, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    events = [event async for event in client.generate("writer", messages=_CHAT, max_new_tokens=12)]
    assert events[0].start.prompt_tokens == len(ids)
    text = await client.generate_text("writer", messages=_CHAT, max_new_tokens=12)
    assert events[-1].response.result.text_generation.sequences[0] == text
    assert (await client.get_model("writer")).has_chat_template


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"messages": [_said("hi", "nobody")]}, "messages: the model's template refuses them: nobody speaks"),
        ({"messages": [_said("hi", "")]}, "messages[0].role: has 0 characters, must have 1 to 64"),
        ({"messages": [_said("a\0")]}, "messages[0].content: has the character NUL at position 1"),
        ({"messages": []}, "prompt: is empty"),
        ({"messages": _CHAT * 513}, "messages: 1026 messages, the limit is 1024"),
        ({"messages": _CHAT, "truncation": Truncation.TRUNCATION_LEFT}, "truncation: is for prompts"),
        ({"messages": [_said("module " * 500)]}, "no room for a text: the model takes 192; send less"),
        ({"messages": _CHAT, "max_new_tokens": 190}, "the model takes 192 together; lower max_new_tokens"),
        ({"messages": _CHAT, "prompt": "both"}, "prompt: give either a prompt or messages"),
        ({"messages": [{"role": "user", "text": "hi"}]}, "messages: takes messages, each with a role and a content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_messages_are_refused_by_name(client: AsyncClient, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        await client.generate_text("writer", **given)
    assert problem in refused.value.message


async def test_a_seed_gives_the_same_text_alone_and_among_others(client: AsyncClient) -> None:
    alone = await client.generate_text("writer", _PROMPT, max_new_tokens=16, do_sample=True, seed=5)
    requests = [_request(max_new_tokens=16, do_sample=True, seed=seed) for seed in range(8)]
    outcomes = await client.infer_batch(requests)
    among = [outcome.response.result.text_generation.sequences[0] for outcome in outcomes]
    assert among[5] == alone
    assert len({sequence.text for sequence in among}) > 1


async def test_log_probabilities_are_those_of_the_model(client: AsyncClient, repository: Path) -> None:
    source = repository.parent / "source"
    model = transformers.AutoModelForCausalLM.from_pretrained(source).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    prompt = tokenizer(_PROMPT)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 8, "top_logprobs": 3, "repetition_penalty": 1.3, "do_sample": True}
    events = await _generate(client, seed=4, temperature=1.4, **options)
    text = events[-1].response.result.text_generation.sequences[0]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    assert [logprob.token_id for logprob in text.logprobs] == list(text.token_ids)
    for row, token in zip(expected, text.logprobs, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-3)
        best = row.topk(3)
        assert [top.token_id for top in token.top] == best.indices.tolist()
        assert [top.logprob for top in token.top] == pytest.approx(best.values.tolist(), abs=1e-3)
        assert token.text == tokenizer.decode([token.token_id], skip_special_tokens=True)
    assert [logprob for event in events for logprob in event.chunk.logprobs] == list(text.logprobs)
    whole = (await client.infer(_request(seed=4, temperature=1.4, **options))).result
    assert whole.text_generation.sequences[0] == text


async def test_several_texts_of_a_seed_begin_with_the_one_that_it_gives_alone(client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5, "seed": (1 << 64) - 1}
    alone = await client.generate_text("writer", _PROMPT, **options)
    several = _request(num_return_sequences=3, **options)
    answers = await asyncio.gather(*(client.infer(several) for _ in range(2)))
    events = await _generate(client, num_return_sequences=3, stop_strings=["never said"], **options)
    response = events[-1].response
    texts = list(response.result.text_generation.sequences)
    assert [list(answer.result.text_generation.sequences) for answer in answers] == [texts, texts]
    assert texts[0] == alone
    assert len({sequence.text for sequence in texts}) == 3
    assert not any(sequence.HasField("score") for sequence in texts)
    for number, text in enumerate(texts):
        chunks = [event.chunk for event in events if event.HasField("chunk") and event.chunk.sequence == number]
        assert "".join(chunk.text for chunk in chunks) == text.text
        assert [token for chunk in chunks for token in chunk.token_ids] == list(text.token_ids)
    assert response.usage.generated_tokens == sum(len(sequence.token_ids) for sequence in texts)
    assert (response.usage.tokens, events[0].start.prompt_tokens) == (9, 9)


async def test_a_search_returns_its_best_texts_with_their_scores_and_log_probabilities(
    client: AsyncClient, repository: Path
) -> None:
    source = repository.parent / "source"
    model = transformers.AutoModelForCausalLM.from_pretrained(source).float().eval()
    prompt = transformers.AutoTokenizer.from_pretrained(source)(_PROMPT)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 3, "length_penalty": 1.5}
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            repetition_penalty=1.2,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        logprobs = model.compute_transition_scores(
            found.sequences, found.logits, found.beam_indices, normalize_logits=True
        )
    events = await _generate(client, top_logprobs=2, repetition_penalty=1.2, **options)
    texts = events[-1].response.result.text_generation.sequences
    assert len(texts) == 3
    wanted = zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), logprobs, strict=True)
    for text, (token_ids, score, row) in zip(texts, wanted, strict=True):
        assert list(text.token_ids) == token_ids[: len(text.token_ids)]
        assert text.score == pytest.approx(score, abs=1e-4)
        assert [logprob.logprob for logprob in text.logprobs] == pytest.approx(
            row[: len(text.token_ids)].tolist(), abs=1e-3
        )
        assert all(len(logprob.top) == 2 and logprob.top[0].logprob >= logprob.logprob for logprob in text.logprobs)
    for number, text in enumerate(texts):
        chunks = [event.chunk for event in events if event.HasField("chunk") and event.chunk.sequence == number]
        assert "".join(chunk.text for chunk in chunks) == text.text
        assert [logprob for chunk in chunks for logprob in chunk.logprobs] == list(text.logprobs)
    request = _request(top_logprobs=2, repetition_penalty=1.2, **options)
    assert (await client.infer(request)).result == events[-1].response.result
    best = await client.generate_text("writer", _PROMPT, repetition_penalty=1.2, max_new_tokens=12, num_beams=4)
    assert best.HasField("score")


async def test_a_search_that_draws_gives_the_same_texts_for_the_same_seed(client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3, "do_sample": True}
    request = _request(seed=5, temperature=1.5, **options)
    alone = (await client.infer(request)).result
    others = [_request(seed=seed, temperature=1.5, **options) for seed in range(8)]
    among = [answer.response.result for answer in await client.infer_batch(others)]
    assert among[5] == alone
    assert len({result.text_generation.sequences[0].text for result in among}) > 4


async def test_a_stop_string_ends_the_text_before_it(client: AsyncClient) -> None:
    whole = (await client.generate_text("writer", _PROMPT, max_new_tokens=24)).text
    stop = whole[len(whole) // 2 :][:3]
    events = await _generate(client, max_new_tokens=24, stop_strings=[stop])
    text = events[-1].response.result.text_generation.sequences[0]
    assert text.text == whole[: whole.index(stop)]
    assert text.finish_reason == FinishReason.FINISH_REASON_STOP_STRING
    assert "".join(event.chunk.text for event in events) == text.text
    usage = events[-1].response.usage
    assert usage.generated_tokens == len(text.token_ids)
    assert (await client.infer(_request(max_new_tokens=24, stop_strings=[stop]))).result == events[-1].response.result


async def test_timings_and_usage_say_what_a_text_took(client: AsyncClient) -> None:
    response = (await _generate(client, max_new_tokens=12))[-1].response
    timings, usage = response.timings, response.usage
    stages_ns = timings.preprocess_ns + timings.predict_ns + timings.postprocess_ns
    assert 0 < timings.first_token_ns < timings.total_ns
    assert timings.prefill_ns > 0
    assert timings.longest_gap_ns <= timings.decode_ns <= timings.predict_ns
    assert timings.predict_compute_ns == timings.prefill_ns + timings.decode_ns
    assert stages_ns <= timings.total_ns
    assert usage.generated_tokens == 12
    assert usage.steps >= 12
    assert usage.tokens == 9


async def test_a_task_that_does_not_generate_has_a_response_only(client: AsyncClient) -> None:
    request = InferRequest(model="writer", input=TaskInput(tokenization=TokenizationInput(text="a file")))
    with client._connection.use() as stubs:
        events = [event async for event in stubs.inference.Generate(request)]
    assert len(events) == 1
    assert events[0].response.result == (await client.infer(request)).result


async def test_other_tasks_of_texts_are_refused(client: AsyncClient) -> None:
    with pytest.raises(WrongTask, match="text-generation, not text-classification"):
        await client.classify("writer", "a text")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_new_tokens": 192}, "options.max_new_tokens: 192, must be 1 to 191"),
        ({"max_new_tokens": 0}, "options.max_new_tokens: 0, must be 1 to 191"),
        ({"max_new_tokens": 4, "min_new_tokens": 5}, "options.min_new_tokens: 5, more than max_new_tokens, 4"),
        ({"max_new_tokens": 190}, "prompt: 9 tokens and 190 new ones, the model takes 192 together"),
        ({"seed": 3}, "options.seed: has an effect only with do_sample"),
        ({"do_sample": True, "temperature": 0.0}, "options.temperature: 0, must be more than 0, and at most 100"),
        (
            {"do_sample": True, "temperature": float("nan")},
            "options.temperature: nan, must be more than 0, and at most 100",
        ),
        ({"do_sample": True, "top_p": 1.5}, "options.top_p: 1.5, must be 0 to 1"),
        ({"do_sample": True, "min_p": -0.1}, "options.min_p: -0.1, must be 0 to 1"),
        ({"top_logprobs": 21}, "options.top_logprobs: 21, must be 0 to 20"),
        ({"num_return_sequences": 2}, "options.num_return_sequences: more than 1 text need do_sample or num_beams"),
        ({"num_return_sequences": 4, "num_beams": 3}, "options.num_return_sequences: 4, must be at most num_beams, 3"),
        ({"num_beams": 2, "stop_strings": ["a"]}, "options.stop_strings: cannot be combined with num_beams"),
        ({"do_sample": True, "num_return_sequences": 17}, "options.num_return_sequences: 17, must be 1 to 16"),
        ({"do_sample": True, "num_return_sequences": 0}, "options.num_return_sequences: 0, must be 1 to 16"),
        (
            {"do_sample": True, "temperature": -1e-8},
            "options.temperature: -1e-08, must be more than 0, and at most 100",
        ),
        ({"repetition_penalty": 1e-46}, "options.repetition_penalty: 1e-46, must be 0.01 to 100"),
        ({"repetition_penalty": 101.0}, "options.repetition_penalty: 101, must be 0.01 to 100"),
        ({"stop_strings": [""]}, "options.stop_strings: one has 0 characters, must have 1 to 256"),
        ({"stop_strings": ["a" * 10_000]}, "options.stop_strings: one has 10000 characters"),
        ({"stop_strings": ["a"] * 17}, "options.stop_strings: 17, the limit is 16"),
        ({"stop_token_ids": [5_000_000]}, "options.stop_token_ids: the id 5000000, the vocabulary has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_bad_options_are_refused_by_name(client: AsyncClient, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        await _generate(client, **options)
    assert problem in refused.value.message


async def test_an_empty_prompt_and_one_that_is_too_long_are_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidInput, match="prompt: is empty"):
        await client.generate_text("writer", "")
    with pytest.raises(InvalidInput, match=r"no room for a text: the model takes 192; set truncation to cut"):
        await client.generate_text("writer", "module " * 500, max_new_tokens=8)
    with pytest.raises(InvalidInput, match=r"the model takes 192 together; lower max_new_tokens, or set truncation"):
        await client.generate_text("writer", _PROMPT, max_new_tokens=190)
    text = await client.generate_text(
        "writer", "module " * 500, max_new_tokens=8, truncation=Truncation.TRUNCATION_LEFT
    )
    assert len(text.token_ids) == 8


async def test_a_deadline_ends_a_text(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await _generate(client, max_new_tokens=180, timeout_s=0.02)


async def test_callers_that_leave_free_their_blocks(processes: dict[str, dict[str, ServiceProcess]]) -> None:
    four = processes["four processes"]

    async def leave(client: AsyncClient, number: int) -> None:
        events = client.generate("writer", f"{number} {_PROMPT}", max_new_tokens=150)
        async for event in events:
            if event.HasField("chunk"):
                break
        await events.aclose()

    async with AsyncClient(four["gateway"].target, timeout_s=120) as client:
        await asyncio.gather(*(leave(client, number) for number in range(12)))
        await happens(lambda: not _in_use(four["neuron-executor"]))
        assert (await client.generate_text("writer", _PROMPT, max_new_tokens=4)).token_ids


async def test_the_prompt_of_several_texts_is_computed_once(processes: dict[str, dict[str, ServiceProcess]]) -> None:
    """The others get its full blocks, of 32 tokens each."""
    four = processes["four processes"]
    prompt = " ".join(f"once {number}" for number in range(1000, 1017))
    async with AsyncClient(four["gateway"].target, timeout_s=120) as client:
        before = _metric(four["neuron-executor"], "cached_tokens_total")
        options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
        events = [event async for event in client.generate("writer", prompt, **options)]
        after = _metric(four["neuron-executor"], "cached_tokens_total")
    full = (events[0].start.prompt_tokens - 1) // 32 * 32
    assert full >= 64
    assert after - before == 2 * full


async def test_many_mixed_requests_leave_no_block_in_use(processes: dict[str, dict[str, ServiceProcess]]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance, four, turns = random.Random(seed), processes["four processes"], asyncio.Semaphore(_MANY)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"do_sample": True, "num_return_sequences": 3},
        {"stop_strings": ["e"]},
        {"top_logprobs": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"repetition_penalty": 1.2},
    )

    async def ask(client: AsyncClient, number: int) -> str:
        text = "module " * chance.randint(1, 60)
        given = {"messages": [_said(text)]} if chance.random() < 0.3 else {"prompt": f"{number % 7} {text}"}
        options = kinds[number % len(kinds)] | {"max_new_tokens": chance.randint(1, 40)}
        reads = chance.randint(1, 8) if chance.random() < 0.4 else 0
        try:
            async with turns:
                events = client.generate("writer", timeout_s=None if number % 10 else 0.05, **given, **options)
                async for event in events:
                    if event.HasField("chunk") and reads:
                        reads -= 1
                        if not reads:
                            await events.aclose()
                            return "left"
        except (DeadlineExceeded, Overloaded):  # refused where it would be late
            assert number % 10 == 0
            return "late"
        return "whole"

    async with AsyncClient(four["gateway"].target, timeout_s=None, retries=False) as client:
        ends = await asyncio.gather(*(ask(client, number) for number in range(_SOAKED)))
        await happens(lambda: not _in_use(four["neuron-executor"]))
        assert {"left", "whole"} <= set(ends)


def test_a_caller_who_reads_late_gets_the_whole_text_and_holds_no_blocks(
    processes: dict[str, dict[str, ServiceProcess]],
) -> None:
    four, before = processes["four processes"], _metric(processes["four processes"]["neuron-executor"], "tokens_total")
    with RawHttp2(four["gateway"].target, window=0) as caller:
        stream = caller.open_call(_GENERATE)
        caller.send_message(stream, _request(max_new_tokens=150, min_new_tokens=150).SerializeToString())
        until(lambda: _metric(four["neuron-executor"], "tokens_total") >= before + 150)
        until(lambda: _in_use(four["neuron-executor"]) == 0)
        # The gateway may be behind: it has the whole text once the request has left its pipeline.
        until(lambda: _metric(four["gateway"], "in_flight", "neuronpipe_request") == 0)
        caller.frames.increment_flow_control_window(1 << 20, stream)
        caller.flush()
        events = _messages(caller.events(lambda event: isinstance(event, h2.events.TrailersReceived)))
    # Of the tokens that came while the caller did not read, one chunk.
    assert [event.WhichOneof("event") for event in events] == ["start", "chunk", "response"]
    (text,) = events[-1].response.result.text_generation.sequences
    assert (events[1].chunk.text, len(events[1].chunk.token_ids)) == (text.text, 150)


def test_a_caller_who_never_reads_loses_its_call_and_holds_no_blocks(repository: Path) -> None:
    options = ("--repository", str(repository), *_METRICS)
    with (
        ServiceProcess("all", *options, environment=constants(max_send_s=1)) as server,
        RawHttp2(server.wait_until_ready().target, window=0) as caller,
    ):
        stream = caller.open_call(_GENERATE)
        caller.send_message(stream, _request(max_new_tokens=150).SerializeToString())
        assert caller.status(stream) == "reset"
        until(lambda: _in_use(server) == 0)
        with Client(server.target, timeout_s=120) as client:
            assert client.generate_text("writer", _PROMPT, max_new_tokens=4).token_ids


def _messages(events: Iterable[h2.events.Event]) -> list[GenerateResponse]:
    """The messages of a call, each behind a byte and its length in four."""
    data = b"".join(bytes(event.data) for event in events if isinstance(event, h2.events.DataReceived))
    messages = []
    while data:
        end = 5 + int.from_bytes(data[1:5], "big")
        messages.append(GenerateResponse.FromString(data[5:end]))
        data = data[end:]
    return messages


def _in_use(executor: ServiceProcess) -> float:
    return _metric(executor, "blocks_in_use")


def _metric(service: ServiceProcess, name: str, of: str = "neuronpipe_generation") -> float:
    return metric(service, f"{of}_{name}")


def test_the_blocking_client_reads_a_text_as_it_comes(processes: dict[str, dict[str, ServiceProcess]]) -> None:
    with Client(processes["one process"]["gateway"].target, timeout_s=120) as client:
        events = list(client.generate("writer", _PROMPT, max_new_tokens=8))
        left = client.generate("writer", _PROMPT, max_new_tokens=100)
        next(left)
        left.close()
        assert events[-1].response.result.text_generation.sequences[0] == client.generate_text(
            "writer", _PROMPT, max_new_tokens=8
        )


async def test_an_executor_that_dies_ends_its_texts_and_nothing_is_tried_again(repository: Path) -> None:
    has_begun = asyncio.Event()

    async def read(client: AsyncClient) -> tuple[list[GenerateResponse], str]:
        """What came, and the error that ended it; empty for none."""
        events = []
        try:
            async for event in client.generate("writer", _PROMPT, max_new_tokens=170):
                events.append(event)
                if event.HasField("chunk"):
                    has_begun.set()
        except Unavailable as error:
            return events, error.message
        return events, ""

    async def kill(executor: ServiceProcess) -> None:
        """Lets it run only for moments, or else its texts are complete before a caller sees that they have begun."""
        while not has_begun.is_set():
            executor.signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
            executor.signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
        executor.signal(signal.SIGKILL)

    with two_processes(repository) as processes:
        async with AsyncClient(processes["gateway"].target, timeout_s=120, retries=False) as client:
            # More than run at once, so that some are left whenever the signal comes.
            killed = asyncio.create_task(kill(processes["neuron-executor"]))
            texts = await asyncio.gather(*(read(client) for _ in range(_MANY)))
            await killed
    ended = [(events, error) for events, error in texts if error]
    assert not any(event.HasField("response") for events, _ in ended for event in events)
    begun = [error for events, error in ended if any(event.HasField("chunk") for event in events)]
    assert begun
    assert [error for error in begun if "tokens of the text" not in error] == []
