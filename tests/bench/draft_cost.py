"""Prompt lookup: how long a step with several tokens of each text takes, and how long a token takes, by the share of
drafted tokens that are right. The share is forced: drafts are made of the text itself. It is CPU time of one thread, so
that other load matters little.

Run: python -m tests.bench.generation_models FOLDER; python -m tests.bench.draft_cost FOLDER
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.metrics import Telemetry
from neuronpipe.stages.neuron_executor.backends import load_decoder
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun
from neuronpipe.stages.settings import EngineSettings
from tests.bench.generation_alone import LLAMA, VOCABULARY, make_item
from tests.suite.constants import with_constants

_TEXTS, _ROUNDS = (1, 8, 32), 3
_TOKENS, _PAST, _BLOCKS = (1, 2, 4, 6), 200, 8
_RIGHT, _DRAFT = (0.0, 0.25, 0.5, 0.75, 1.0), 4
_PROMPT, _NEW = 64, 32


def main() -> None:
    """Prints the tables."""
    (bundle,) = (bundle for bundle in read_repository(Path(sys.argv[1]) / "repository") if bundle.spec.name == LLAMA)
    print(f"milliseconds of a step, with {_TOKENS} tokens of each text")
    for texts in _TEXTS:
        print(texts, [f"{took:.1f}" for took in _steps(bundle, texts)], flush=True)
    print(f"milliseconds of a token, without drafts, and with {_RIGHT} of their tokens right")
    for texts in _TEXTS:
        print(texts, [f"{took:.2f}" for took in asyncio.run(_tokens(bundle, texts))], flush=True)


def _steps(bundle: Bundle, texts: int) -> list[float]:
    artifact = bundle.artifact("openvino")
    with bundle.artifact_files(artifact) as files:
        request = BackendRequest(bundle.spec, files, artifact.properties, cores=1, threads=1)
        model = load_decoder("openvino", request, max_tokens=texts * 32 * _BLOCKS, max_bytes=1 << 30)
    took: dict[int, list[float]] = {tokens: [] for tokens in _TOKENS}
    for round in range(_ROUNDS + 1):
        for tokens, found in took.items():
            blocks = [range(_BLOCKS * row, _BLOCKS * (row + 1)) for row in range(texts)]
            runs = [DecoderRun([3] * tokens, _PAST, row_blocks, tokens) for row_blocks in blocks]
            began_s = time.process_time()
            model.compute(runs)
            if round:  # the first step of a shape takes longer
                found.append(1e3 * (time.process_time() - began_s))
    return [statistics.median(found) for found in took.values()]


async def _tokens(bundle: Bundle, texts: int) -> list[float]:
    """Of the same texts, whose first tokens come in one step."""
    settings = with_constants(
        EngineSettings,
        threads=1,
        prompt_lookup_tokens=_DRAFT,
        kv_cache_bytes=1 << 28,
        step_tokens=_PROMPT * max(_TEXTS),
    )
    async with running_devices(settings, Telemetry()) as devices, devices.open_generator(bundle) as generator:
        known, chance = dict[tuple[int, ...], list[int]](), random.Random(0)

        def find(token_ids: Sequence[int], count: int, right: float) -> list[int]:
            text = known.get(tuple(token_ids[:_PROMPT]), [])[len(token_ids) :][:count]
            return [token if chance.random() < right else (token + 1) % VOCABULARY for token in text]

        async def measure(right: float) -> float:
            began_s = 0.0

            def begin(new: NewTokens) -> None:
                nonlocal began_s
                began_s = began_s or time.process_time()

            stream: Any = SimpleNamespace(put=begin)
            items = [make_item(bundle.spec, number, _PROMPT, _NEW) for number in range(texts)]
            with mock.patch.object(PromptLookup, "find", lambda _, ids, count: find(ids, count, right)):
                with generator._steps.lock:
                    calls = [asyncio.create_task(generator.generate(item, stream)) for item in items]
                    await asyncio.sleep(0)
                predictions = await asyncio.gather(*calls)
            took_s = time.process_time() - began_s
            for item, prediction in zip(items, predictions, strict=True):
                prompt = item.sequences.arrays[0]["input_ids"].tolist()
                text = [*prompt, *prediction.outputs.arrays[0]["token_ids"].tolist()]
                if known.setdefault(tuple(prompt), text) != text:
                    raise RuntimeError("a draft has changed a text")
            return 1e3 * took_s / (texts * (_NEW - 1))

        # No text is known in the first turn, so its drafts are empty.
        return [await measure(right) for right in (0.0, *_RIGHT)]


if __name__ == "__main__":
    main()
