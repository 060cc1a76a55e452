"""Whole systems: throughput by the share of texts that are known, requests while Redis hangs, and results of repeated
traffic.
"""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import AsyncClient
from tests.bench.cache.texts import texts
from tests.bench.load import Answer, LoadProcess, percentile_ms, send_all
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, NO_CACHE, find_repository, make_request, serving_all, serving_four
from tests.servers.redis import RedisServer

_CALLERS = 32
_SENT = 40_000
_KNOWN = 1_000
_TOKENS = 33
ZIPF_TEXTS = 10_000
_ZIPF_EXPONENT = 1.0
# Caches are empty at first, and take a while to fill.
_ZIPF_FACTOR = 5
_MEMORY = ("--token-cache-bytes", str(64 << 20))
HANG_CALLERS = 8
_WARM_UP_S, _HANG_S = 1.0, 2.0

# Figures by name, as cache.json has them.
Figures: TypeAlias = dict[str, Any]


def measure_known_texts(rounds: int, seconds: float) -> Iterator[Figures]:
    """The fake back end, as what it takes is everything but the model: the cache off, and on with 0, 50 and 90 % of
    texts known.
    """
    repository = find_repository("fake")
    loads = {f"{rate:.0%} known": _requests(rate) for rate in (0.0, 0.5, 0.9)}
    systems = ((ALL, serving_all), (FOUR, serving_four))
    for round, (name, serving) in itertools.product(range(rounds), systems):
        for (way, requests), (options, kind) in itertools.product(loads.items(), ((NO_CACHE, "off"), (_MEMORY, "on"))):
            with serving(repository, name, options) as system, LoadProcess.started(requests) as loop:
                turn = loop.measure(system, _CALLERS, seconds, "known", round)
            yield _figures(turn, f"{way}, {kind}")


def measure_zipf(rounds: int, seconds: float) -> Iterator[Figures]:
    """MiniLM behind `serve all`: results cached, only tokens cached, and nothing cached, under requests by Zipf's law
    over 10,000 texts.
    """
    pool = list(itertools.islice(texts(_TOKENS, seed=3), ZIPF_TEXTS))
    weights = [1 / rank**_ZIPF_EXPONENT for rank in range(1, ZIPF_TEXTS + 1)]
    requests = [make_request(text) for text in random.Random(4).choices(pool, weights, k=_SENT)]
    repository = find_repository("float32")
    ways = {
        "nothing cached": NO_CACHE,
        "tokens cached": _MEMORY,
        "results cached": (*_MEMORY, "--result-cache-models", "*"),
    }
    for round, (way, options) in itertools.product(range(rounds), ways.items()):
        with serving_all(repository, options=options) as system, LoadProcess.started(requests) as loop:
            yield _figures(loop.measure(system, _CALLERS, seconds * _ZIPF_FACTOR, "zipf", round), way)


def measure_hang(rounds: int, seconds: float) -> Iterator[Figures]:
    """The fake back end behind `serve all`, every text looked up in Redis, which is stopped (SIGSTOP) in the middle."""
    repository = find_repository("fake")
    for round in range(rounds):
        off = asyncio.run(_without_cache(repository, seconds))
        with RedisServer() as redis:
            yield {
                "round": round,
                "off_p99_ms": percentile_ms(off, 99),
                **asyncio.run(_hang(repository, seconds, redis)),
            }


def _requests(rate: float) -> list[bytes]:
    """Requests of which a share is for texts that come again and again."""
    pool = texts(_TOKENS, seed=1)
    known = list(itertools.islice(pool, _KNOWN))
    chance = random.Random(2)
    return [make_request(chance.choice(known) if chance.random() < rate else next(pool)) for _ in range(_SENT)]


def _figures(turn: Measurement, way: str) -> Figures:
    if turn.errors:
        raise RuntimeError(f"{turn.section}, {way}: {turn.errors} errors")
    named = {"section": turn.section, "way": way, "system": turn.system, "round": turn.round}
    percentiles = {f"{name}_ms": turn.latencies_ms[name] for name in ("p50", "p99")}
    return {**named, "throughput_per_s": turn.throughput_per_s, **percentiles}


async def _without_cache(repository: Path, seconds: float) -> Sequence[Answer]:
    with ServiceProcess("all", "--repository", str(repository), *NO_CACHE) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            found = await send_all(
                client.infer, _endless(), callers=HANG_CALLERS, seconds=seconds, warm_up_s=_WARM_UP_S
            )
            return found.answers


async def _hang(repository: Path, seconds: float, redis: RedisServer) -> Figures:
    """Before and after Redis hung, and the worst while it began."""
    options = ("--token-cache-bytes", "0", "--token-cache-redis", "always", "--redis-url", redis.url)
    whole_s = 2 * seconds + _HANG_S
    with ServiceProcess("all", "--repository", str(repository), *options) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            sending = asyncio.create_task(
                send_all(client.infer, _endless(), callers=HANG_CALLERS, seconds=whole_s, warm_up_s=_WARM_UP_S)
            )
            await asyncio.sleep(_WARM_UP_S + seconds)
            stopped_s, stopped_at = time.monotonic(), time.time()
            redis.send(signal.SIGSTOP)
            await asyncio.sleep(_HANG_S + seconds)
            redis.send(signal.SIGCONT)
            answers = (await sending).answers
            # Whoever waited was let go on as the breaker opened; the log says when, to the millisecond.
            lost = [
                datetime.fromisoformat(str(line["time"])).timestamp()
                for line in process.events()
                if str(line["event"]).startswith("no answer from Redis")
            ]
    opened_at = min(at for at in lost if at >= stopped_at - 0.001)
    begins_s, ends_s = stopped_s - 0.1, stopped_s + 0.5
    during = [answer.latency_s for answer in answers if begins_s <= answer.due_s < ends_s]
    return {
        "before_p99_ms": percentile_ms([answer for answer in answers if answer.due_s < begins_s], 99),
        "after_p99_ms": percentile_ms([answer for answer in answers if answer.due_s >= ends_s], 99),
        "worst_ms": max(during) * 1e3,
        "opened_after_ms": (opened_at - stopped_at) * 1e3,
    }


def _endless() -> Iterator[InferRequest]:
    return (InferRequest.FromString(make_request(text)) for text in texts(_TOKENS, seed=random.randrange(1 << 30)))
