"""The tokenizer stage in this process: what a text costs off, found in memory, found in Redis, and missing; alone and
in batches.
"""

import asyncio
import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.bundles.writing import write_manifest
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ModelKey, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import pack_input
from neuronpipe.platform.cache.settings import CachePolicy, RedisSettings
from neuronpipe.stages.settings import EncodingSettings
from neuronpipe.stages.tokenizer.stage import TokenizerStage, running_tokenizer
from tests.bench.cache.texts import texts
from tests.bench.systems import MODEL
from tests.suite.constants import with_constants

LENGTHS = {30: 640, 350: 320, 2000: 96}
BATCHES = (1, 32)
HIT_RATES = (0.0, 0.5, 0.9, 1.0)
_MAX_TOKENS = 8192
_REDIS_SETTLES_S = 0.3
# How many texts Redis is asked for before anything is measured, so that the estimates know it.
_TRIED = 96


# Of one way to get texts of one length tokenized, some at a time.
Figures: TypeAlias = dict[str, Any]


def bundle_for_long_texts(repository: Path, folder: Path) -> Bundle:
    """The benchmark's model as if it took texts of 8,192 tokens: its tokenizer does."""
    bundle = read_bundle(repository / MODEL / "1")
    copy = folder / MODEL / "1"
    shutil.copytree(bundle.folder, copy)
    (copy / "manifest.json").unlink()
    spec = bundle.spec.model_copy(update={"max_tokens": _MAX_TOKENS})
    write_manifest(copy, bundle.manifest.model_copy(update={"model": spec}))
    return read_bundle(copy)


async def measure_ways(bundle: Bundle, url: str) -> AsyncIterator[Figures]:
    """Off, memory hit, Redis hit, and a miss in both."""
    for (tokens, count), batch in itertools.product(LENGTHS.items(), BATCHES):
        known = list(itertools.islice(texts(tokens, seed=tokens + batch), count))
        async with running_tokenizer([bundle], EncodingSettings(token_cache_bytes=0), Telemetry()) as stage:
            await _run(stage, known[:64], batch)
            yield await _run(stage, known, batch, "off", tokens)
        async with running_tokenizer([bundle], *_redis(url, "always", memory_bytes=256 << 20)) as stage:
            await _connect(stage)
            yield await _run(stage, known, batch, "miss in memory and in Redis", tokens)
            await asyncio.sleep(_REDIS_SETTLES_S)
            yield await _run(stage, known, batch, "hit in memory", tokens)
        async with running_tokenizer([bundle], *_redis(url, "always")) as stage:
            await _connect(stage)
            yield await _run(stage, known, batch, "hit in Redis", tokens)
        async with running_tokenizer([bundle], EncodingSettings(), Telemetry()) as stage:
            await _run(stage, ["warm"], 1)
            yield await _run(stage, known, batch, "miss in memory, no Redis", tokens)


async def measure_hit_rates(bundle: Bundle, url: str) -> AsyncIterator[Figures]:
    """Off, Redis always, and Redis where it is worth it, without memory, by the share of texts that Redis has."""
    for (tokens, count), batch, rate in itertools.product(LENGTHS.items(), BATCHES, HIT_RATES):
        pool = texts(tokens, seed=hash((tokens, batch, rate)) % 10_000)
        known = list(itertools.islice(pool, count))
        async with running_tokenizer([bundle], *_redis(url, "always")) as stage:
            await _connect(stage)
            await _run(stage, known, 32)
            await asyncio.sleep(_REDIS_SETTLES_S)
        for policy in ("off", "always", "auto"):
            settings = (EncodingSettings(token_cache_bytes=0), Telemetry()) if policy == "off" else _redis(url, policy)  # type: ignore[arg-type]
            async with running_tokenizer([bundle], *settings) as stage:
                if policy != "off":
                    await _connect(stage)
                # So long as the estimates learn, and once more.
                for _ in range(2):
                    chance = random.Random(tokens)
                    sent = [chance.choice(known) if chance.random() < rate else next(pool) for _ in range(count)]
                    figures = await _run(stage, sent, batch, policy, tokens)
                yield figures | {"hit_rate": rate}


def _redis(url: str, policy: CachePolicy, memory_bytes: int = 0) -> tuple[EncodingSettings, Telemetry, RedisSettings]:
    """Arguments of running_tokenizer."""
    redis = with_constants(RedisSettings, redis_url=url, redis_timeout_ms=1000)
    return EncodingSettings(token_cache_redis=policy, token_cache_bytes=memory_bytes), Telemetry(), redis


async def _connect(stage: TokenizerStage) -> None:
    for number in range(_TRIED):
        await stage.tokenize(_item(f"connect {number}"))
        await asyncio.sleep(0.01)


async def _run(stage: TokenizerStage, sent: Sequence[str], batch: int, way: str = "", tokens: int = 0) -> Figures:
    items = [_item(text) for text in sent]
    durations_us: list[float] = []
    outcomes: Counter[str] = Counter()

    async def tokenize(item: TokenizeItem) -> None:
        began_s = time.perf_counter()
        encoded = await stage.tokenize(item)
        durations_us.append((time.perf_counter() - began_s) * 1e6)
        outcomes[CacheOutcome.Name(encoded.token_cache).removeprefix("CACHE_OUTCOME_")] += 1

    cpu_began_s, began_s = time.process_time(), time.perf_counter()
    for begin in range(0, len(items), batch):
        if batch == 1:
            await tokenize(items[begin])
        else:
            await asyncio.gather(*map(tokenize, items[begin : begin + batch]))
    cpu_s, elapsed_s = time.process_time() - cpu_began_s, time.perf_counter() - began_s
    p50_us, p99_us = np.percentile(durations_us, (50, 99)).tolist()
    return {
        "way": way, "tokens": tokens, "batch": batch,
        "cpu_us": cpu_s / len(items) * 1e6, "elapsed_us": elapsed_s / len(items) * 1e6,
        "p50_us": p50_us, "p99_us": p99_us, "outcomes": dict(outcomes),
    }  # fmt: skip


def _item(text: str) -> TokenizeItem:
    return TokenizeItem(
        Call(), ModelKey(MODEL, 1), pack_input(TaskInput(text_classification=TextClassificationInput(text=text)))
    )
