"""Generated texts: tokens a second beside transformers and the engine alone, the prefix cache, long prompts beside
others, and overload.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from demo.processes import four_processes
from neuronpipe.client import Client
from neuronpipe.measure.figures import Distribution
from neuronpipe.measure.load.inputs import PromptMaker, builtin_texts, count_words
from neuronpipe.measure.load.report import GenerationResult, LoadResult
from neuronpipe.measure.load.request import GenerationLoad, Lengths, LoadRequest
from neuronpipe.measure.load.run import run_load
from tests.bench.generation_alone import (
    BART,
    ENDING,
    LLAMA,
    WARM_UP_S,
    Alone,
    running_alone,
    serve_engine,
    serve_transformers,
)
from tests.bench.generation_peers import EXPECTED_FILE, GenerationPeer, running_generation_peers
from tests.bench.measurements import Measurement, percentiles_of
from tests.bench.peers.environments import CACHE
from tests.bench.peers.generating import BEAMS
from tests.bench.systems import FOUR, NO_CACHE, run_module

SECTION = "generation"
TRANSFORMERS, ENGINE = "transformers", "engine alone"
LLAMA_CALLERS, BART_CALLERS = (1, 8, 32), (1, 8)
PREFIX, NO_PREFIX = "shared prefix", "no shared prefix"
WITH_SCHEMA = f"{FOUR}, with a schema"
LONG_PROMPTS, OVERLOAD = "beside long prompts", "overload"
GAP_CALLERS = 8
FIRST_TOKEN_LIMIT_MS, TOKEN_LIMIT_MS, FACTOR = 1000.0, 100.0, 2.0
_PROMPT, _TEXT = 64, 48
# No text is complete before its last token.
_FIELDS = {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}, "is_new": {"type": "boolean"}}
_ITEM = {"type": "object", "properties": _FIELDS, "required": ["name", "size"], "additionalProperties": False}
_SCHEMA = json.dumps({"type": "array", "items": _ITEM, "minItems": _TEXT})
_SOURCE = 256
_SHARED, _OWN = 128, 32
_LONG = 2000
_LONG_EVERY_S = 2.0
# The queue has to fill, and long prompts have to come, before these say anything.
_LONG_TURN = 4
# Prompts that are taken shall have their first token within its limit.
MAX_PROMPT_WAIT_S = 0.4
_STAGE_OPTIONS = {"tokenizer": NO_CACHE, "neuron-executor": ("--max-prompt-wait-s", f"{MAX_PROMPT_WAIT_S:g}")}
_TRIES = 5

Others: TypeAlias = Mapping[str, Alone | GenerationPeer]


def of_model(model: str, system: str) -> str:
    """The name of a system with a model."""
    return f"{model}, {system}"


def measure_generation(rounds: int, seconds: float, unavailable: dict[str, str]) -> Iterator[Measurement]:
    """The systems take turns; one that waits for its turn costs nothing. Throughput is of new tokens, and of `overload`
    that of texts within the limits. Notes the reason of each peer that cannot be measured in `unavailable`.
    """
    folder = _find_models()
    with ExitStack() as stack:
        processes = stack.enter_context(four_processes(folder / "repository", stage_options=_STAGE_OPTIONS))
        target = processes["gateway"].target
        transformers = stack.enter_context(running_alone(serve_transformers, folder))
        engine = stack.enter_context(running_alone(serve_engine, folder))
        beside: dict[str, dict[str, Alone | GenerationPeer]] = {
            LLAMA: {TRANSFORMERS: transformers, ENGINE: engine},
            BART: {TRANSFORMERS: transformers},
        }
        for peer in stack.enter_context(running_generation_peers(folder, unavailable)):
            beside[peer.model][peer.name] = peer
        for round in range(rounds):
            yield from _llama(target, beside[LLAMA], round, seconds)
            yield from _bart(target, beside[BART], round, seconds)
            yield from _first_tokens(target, round, seconds)
            yield _beside_long_prompts(target, round, _LONG_TURN * seconds)
            yield _overload(target, round, _LONG_TURN * seconds)


def _find_models() -> Path:
    folder = CACHE / "generation"
    if not ((folder / EXPECTED_FILE).is_file() and (folder / "sources" / ENDING).is_dir()):
        # A process of its own: torch stays out of the one that measures.
        run_module("-m", "tests.bench.generation_models", str(folder))
    return folder


def _llama(target: str, others: Others, round: int, seconds: float) -> Iterator[Measurement]:
    load = GenerationLoad(prompt_tokens=Lengths.fixed(_PROMPT), output_tokens=Lengths.fixed(_TEXT))
    with_schema = replace(load, json_schema=_SCHEMA)
    for callers in LLAMA_CALLERS:
        for name, model, form in ((FOUR, LLAMA, load), (WITH_SCHEMA, ENDING, with_schema)):
            result = run_turn(target, model, form, round, seconds, concurrency=callers)
            found = texts_of(result)
            turn = Measurement.of(result, SECTION, of_model(LLAMA, name), callers, round, times_between(found))
            yield with_tokens(turn, found.output_tokens_per_s, found.first_token_ms)
        yield from beside_turns(others, LLAMA, _PROMPT, callers, round, seconds)


def _bart(target: str, others: Others, round: int, seconds: float) -> Iterator[Measurement]:
    load = GenerationLoad(prompt_tokens=Lengths.fixed(_SOURCE), output_tokens=Lengths.fixed(_TEXT), num_beams=BEAMS)
    for callers in BART_CALLERS:
        result = run_turn(target, BART, load, round, seconds, concurrency=callers)
        turn = Measurement.of(result, SECTION, of_model(BART, FOUR), callers, round)
        yield replace(turn, throughput_per_s=_TEXT * _texts_per_s(result, callers))
        yield from beside_turns(others, BART, _SOURCE, callers, round, seconds)


def beside_turns(
    others: Others,
    model: str,
    prompt_tokens: int,
    callers: int,
    round: int,
    seconds: float,
    section: str = SECTION,
) -> Iterator[Measurement]:
    """A turn of each of the others."""
    for name, other in others.items():
        rate_per_s = other.measure(model, prompt_tokens, _TEXT, callers, seconds)
        if rate_per_s is not None:
            system = of_model(model, name)
            yield Measurement(section=section, system=system, callers=callers, round=round, throughput_per_s=rate_per_s)


def _first_tokens(target: str, round: int, seconds: float) -> Iterator[Measurement]:
    for name, shared in ((PREFIX, _SHARED), (NO_PREFIX, 0)):
        load = GenerationLoad(
            prompt_tokens=Lengths.fixed(_SHARED + _OWN - shared),
            output_tokens=Lengths.fixed(4),
            shared_prefix_tokens=shared,
        )
        result = run_turn(target, LLAMA, load, round, seconds, concurrency=1)
        found = texts_of(result)
        turn = Measurement.of(result, SECTION, name, 1, round, {"cached": found.cached_ratio or 0.0})
        yield with_tokens(turn, found.output_tokens_per_s, found.first_token_ms)


def _beside_long_prompts(target: str, round: int, seconds: float) -> Measurement:
    load = GenerationLoad(prompt_tokens=Lengths.fixed(_PROMPT), output_tokens=Lengths.fixed(4 * _TEXT))
    maker = PromptMaker(count_words(LoadRequest(target=target, model=LLAMA), builtin_texts(0)), (round,))
    with _repeated(lambda: _read_long(target, maker.make(_LONG)), _LONG_EVERY_S):
        result = run_turn(target, LLAMA, load, round, seconds, concurrency=GAP_CALLERS)
    found = texts_of(result)
    figures = times_between(found)
    if found.inter_token_ms:
        figures["longest_to_median"] = found.inter_token_ms.max / found.inter_token_ms.p50
    turn = Measurement.of(result, SECTION, LONG_PROMPTS, GAP_CALLERS, round, figures)
    return with_tokens(turn, found.output_tokens_per_s, found.inter_token_ms)


def _overload(target: str, round: int, seconds: float) -> Measurement:
    """Texts whose first token comes within a second, and the others every 100 ms: what a closed loop gets, and what
    twice as many callers get.
    """
    load = GenerationLoad(
        prompt_tokens=Lengths.fixed(_PROMPT),
        output_tokens=Lengths.fixed(_TEXT),
        first_token_limit_ms=FIRST_TOKEN_LIMIT_MS,
        token_limit_ms=TOKEN_LIMIT_MS,
    )
    callers = LLAMA_CALLERS[-1]
    capacity_per_s = _texts_per_s(run_turn(target, LLAMA, load, round, seconds, concurrency=callers), callers)
    rate_per_s = FACTOR * capacity_per_s
    # A text that keeps both limits is complete by then.
    deadline_ms = FIRST_TOKEN_LIMIT_MS + (_TEXT - 1) * TOKEN_LIMIT_MS
    result = run_turn(target, LLAMA, load, round, seconds, rate_per_s=rate_per_s, deadline_ms=deadline_ms)
    found = texts_of(result)
    figures = times_between(found) | {
        "capacity_per_s": capacity_per_s,
        "offered_per_s": result.offered_per_s or 0.0,
        "goodput_of_capacity": result.goodput_per_s / capacity_per_s,
    }
    turn = Measurement.of(result, SECTION, OVERLOAD, callers, round, figures)
    return with_tokens(turn, result.goodput_per_s, found.first_token_ms)


def with_tokens(turn: Measurement, rate_per_s: float, latency_ms: Distribution | None) -> Measurement:
    """The turn with another rate and other times: those of tokens."""
    return replace(turn, throughput_per_s=rate_per_s, latencies_ms=percentiles_of(latency_ms))


def run_turn(target: str, model: str, load: GenerationLoad, round: int, seconds: float, **how: Any) -> LoadResult:
    """Other prompts each round, so that none is in the prefix cache. A turn in which no text ends is repeated with
    twice the time.
    """
    request = LoadRequest(target=target, model=model, generation=load, warm_up_s=WARM_UP_S, seed=round, **how)
    for doubled in range(_TRIES):
        result = run_load(replace(request, duration_s=seconds * 2**doubled))
        if result.answers or result.errors:
            break
    return result


def texts_of(result: LoadResult) -> GenerationResult:
    """The figures of a turn's texts. Raises RuntimeError where none ended."""
    if not result.answers or not result.generation:
        raise RuntimeError(
            f"{result.model} ended none of {result.requests} texts in its turn, errors {result.errors}; give more "
            "--seconds"
        )
    return result.generation


def _texts_per_s(result: LoadResult, callers: int) -> float:
    """Of a closed loop: callers by their mean latency, for few texts end in a short turn, many of them at once."""
    texts_of(result)
    return callers / result.latency_ms.mean * 1e3 if result.latency_ms else 0.0


def times_between(found: GenerationResult) -> dict[str, float]:
    """The times between tokens, as figures of a turn."""
    times_ms = found.inter_token_ms
    return {"itl_p50_ms": times_ms.p50, "itl_p99_ms": times_ms.p99, "itl_max_ms": times_ms.max} if times_ms else {}


def _read_long(target: str, prompt: str) -> None:
    with Client(target, timeout_s=60) as client:
        client.generate_text(LLAMA, prompt, max_new_tokens=1)


@contextmanager
def _repeated(call: Callable[[], None], every_s: float) -> Iterator[None]:
    """Calls in a thread, again and again, until the block ends. Raises what a call has raised."""
    has_ended = threading.Event()

    def work() -> None:
        while not has_ended.wait(every_s):
            call()

    with ThreadPoolExecutor(1) as thread:
        calling = thread.submit(work)
        try:
            yield
        finally:
            has_ended.set()
    calling.result()
