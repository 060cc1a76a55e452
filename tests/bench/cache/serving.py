"""Whole systems: throughput by the share of texts that are known, requests while Redis hangs, and results of repeated
traffic.
"""

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import AsyncClient
from tests.bench.cache.texts import texts
from tests.bench.closed_loop import ClosedLoop, Loop
from tests.bench.systems import NO_CACHE, find_repository, make_request, serving_all, serving_four
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
_HANG_S = 2.0


@dataclass(frozen=True)
class ServingFigures:
    """One turn of one system."""

    section: str
    way: str
    system: str
    round: int
    throughput_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class HangFigures:
    """What requests took, in ms, before and after Redis hung, with and without a cache;
    and the worst while it began."""

    round: int
    off_p99_ms: float
    before_p99_ms: float
    after_p99_ms: float
    worst_ms: float
    opened_after_ms: float


def measure_known_texts(rounds: int, seconds: float) -> Iterator[ServingFigures]:
    """The fake back end, as what it takes is everything but the model: the cache off, and on with 0, 50 and 90 % of
    texts known.
    """
    repository = find_repository("fake")
    loads = {f"{rate:.0%} known": _requests(rate) for rate in (0.0, 0.5, 0.9)}
    for round_, (name, serving) in itertools.product(
        range(rounds), (("serve all", serving_all), ("four processes", serving_four))
    ):
        for way, requests in loads.items():
            for options, kind in ((NO_CACHE, "off"), (_MEMORY, "on")):
                with serving(repository, options=options) as system, ClosedLoop.started(requests) as loop:
                    yield _figures("known", f"{way}, {kind}", name, round_, loop.measure(system, _CALLERS, seconds))


def measure_zipf(rounds: int, seconds: float) -> Iterator[ServingFigures]:
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
    for round_, (way, options) in itertools.product(range(rounds), ways.items()):
        with serving_all(repository, options=options) as system, ClosedLoop.started(requests) as loop:
            yield _figures("zipf", way, "serve all", round_, loop.measure(system, _CALLERS, seconds * _ZIPF_FACTOR))


def measure_hang(rounds: int, seconds: float) -> Iterator[HangFigures]:
    """The fake back end behind `serve all`, every text looked up in Redis, which is stopped (SIGSTOP) in the middle."""
    repository = find_repository("fake")
    for round_ in range(rounds):
        off = asyncio.run(_latencies(repository, NO_CACHE, seconds))
        with RedisServer() as redis:
            options = ("--token-cache-bytes", "0", "--token-cache-redis", "always", "--redis-url", redis.url)
            yield asyncio.run(_hang(repository, options, seconds, redis, round_, _p99_ms(off)))


def _requests(rate: float) -> list[bytes]:
    """Requests of which a share is for texts that come again and again."""
    pool = texts(_TOKENS, seed=1)
    known = list(itertools.islice(pool, _KNOWN))
    chance = random.Random(2)
    return [make_request(chance.choice(known) if chance.random() < rate else next(pool)) for _ in range(_SENT)]


def _figures(section: str, way: str, system: str, round_: int, loop: Loop) -> ServingFigures:
    if loop.errors:
        raise RuntimeError(f"{section}, {way}: {loop.errors} errors")
    return ServingFigures(
        section, way, system, round_, loop.throughput_per_s, loop.latencies_ms["p50"], loop.latencies_ms["p99"]
    )


_Timed = tuple[float, float]


async def _call(client: AsyncClient, requests: Iterator[InferRequest], ends: asyncio.Event, seen: list[_Timed]) -> None:
    while not ends.is_set():
        began_s = time.monotonic()
        await client.infer(next(requests))
        seen.append((began_s, time.monotonic() - began_s))


async def _latencies(repository: Path, options: Sequence[str], seconds: float) -> list[float]:
    with ServiceProcess("all", "--repository", str(repository), *options) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            ends, seen = asyncio.Event(), list[_Timed]()
            calling = [asyncio.create_task(_call(client, _endless(), ends, seen)) for _ in range(HANG_CALLERS)]
            await asyncio.sleep(1 + seconds)
            ends.set()
            await asyncio.gather(*calling)
            return [duration_s for began_s, duration_s in seen if began_s > seen[0][0] + 1]


async def _hang(
    repository: Path, options: Sequence[str], seconds: float, redis: RedisServer, round_: int, off_p99_ms: float
) -> HangFigures:
    with ServiceProcess("all", "--repository", str(repository), *options) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            ends, seen = asyncio.Event(), list[_Timed]()
            calling = [asyncio.create_task(_call(client, _endless(), ends, seen)) for _ in range(HANG_CALLERS)]
            await asyncio.sleep(1 + seconds)
            stopped_s = time.monotonic()
            stopped_at = time.time()
            redis.send(signal.SIGSTOP)
            await asyncio.sleep(_HANG_S + seconds)
            redis.send(signal.SIGCONT)
            ends.set()
            await asyncio.gather(*calling)
            # Whoever waited was let go on as the breaker opened; the log says when, to the millisecond.
            lost = [
                _seconds(str(one["time"]))
                for one in process.events()
                if str(one["event"]).startswith("no answer from Redis")
            ]
    opened_at = min(at for at in lost if at >= stopped_at - 0.001)
    before = [duration_s for began_s, duration_s in seen if seen[0][0] + 1 < began_s < stopped_s - 0.1]
    during = [duration_s for began_s, duration_s in seen if stopped_s - 0.1 <= began_s < stopped_s + 0.5]
    after = [duration_s for began_s, duration_s in seen if began_s >= stopped_s + 0.5]
    return HangFigures(
        round_, off_p99_ms, _p99_ms(before), _p99_ms(after), max(during) * 1e3, (opened_at - stopped_at) * 1e3
    )


def _endless() -> Iterator[InferRequest]:
    return (InferRequest.FromString(make_request(text)) for text in texts(_TOKENS, seed=random.randrange(1 << 30)))


def _p99_ms(durations_s: Sequence[float]) -> float:
    return sorted(durations_s)[int(0.99 * len(durations_s))] * 1e3


def _seconds(logged: str) -> float:
    return datetime.fromisoformat(logged).timestamp()
