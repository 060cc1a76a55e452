"""A decoder that remembers tokens where a real one has their keys and values. It is deterministic and hostile.

The scores after a token depend on all tokens that its sequence's blocks hold, so that a block which is mixed up, shared
wrongly, freed too early or not filled gives other tokens. What nobody wrote is poison.
"""

import asyncio
import json
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ExecuteItem, ModelKey, Prediction, Work
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.process.background import run_beside
from neuronpipe.stages.neuron_executor.generation.engine import TextGenerator
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun, TokenScores
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.text_options import complete_options
from tests.suite.constants import with_constants
from tests.suite.waiting import cancelled

VOCABULARY = 64
END = 2
_PIECES = ["<s>", "<pad>", "</s>", *'{}[]":,.-', "\\", "Ġ", "Ċ", *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
_PIECES += ['{"', '":', '",', '"}', "true", "null", ",Ġ"]
# Of fewer tokens than the decoder has scores for: letters, digits, and pieces of JSON.
TOKENIZER_JSON = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": piece, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for number, piece in enumerate(_PIECES[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: number for number, piece in enumerate(_PIECES)},
            "merges": [],
        },
    }
).encode()
_POISON = -1
_MARK = 1000


class WrittenDecoder:
    """See DecoderModel."""

    block_tokens = 4
    part_tokens = 16
    scores_all = True

    def __init__(self, blocks: int, failing_token_id: int = -1, nan_token_id: int = -1) -> None:
        self.blocks = blocks
        self.steps: list[list[DecoderRun]] = []
        self._failing_token_id = failing_token_id
        self._nan_token_id = nan_token_id
        self._written = np.full((blocks, self.block_tokens), _POISON)
        self.read_sources: list[list[int]] = []

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """See DecoderModel. The tokens of a source are marked, so that its blocks are not those of a text."""
        self.read_sources.append(list(token_ids))
        for position, token_id in enumerate(token_ids):
            self._written[blocks[position // self.block_tokens], position % self.block_tokens] = _MARK + token_id

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """See DecoderModel."""
        for source, target in blocks:
            self._written[target] = self._written[source]

    def scores_after(self, token_ids: Sequence[int]) -> np.ndarray:
        """The scores after these tokens."""
        return scores_after(token_ids)

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        """See DecoderModel."""
        self.steps.append(list(runs))
        logits = []
        for run in runs:
            if self._failing_token_id in run.token_ids:
                raise RuntimeError("a token that the test chose")
            for position, token_id in enumerate(run.token_ids, run.past):
                block = run.blocks[position // self.block_tokens]
                self._written[block, position % self.block_tokens] = token_id
            source = self._written[list(run.source_blocks)].reshape(-1)[: run.source_tokens]
            assert len(source) == run.source_tokens, "a source without blocks"
            last = run.past + len(run.token_ids)
            for end in range(last - max(0, run.scored - 1), last + 1):
                held = self._written[list(run.blocks[: -(-end // self.block_tokens)])].reshape(-1)[:end]
                held = np.concatenate([source, held])
                assert _POISON not in held, "tokens that nobody computed"
                if run.scored:
                    logits.append(self.scores_after(held.tolist()))
                    if self._nan_token_id in run.token_ids:
                        logits[-1][:] = np.nan
        rows = np.array(logits, np.float32).reshape(len(logits), VOCABULARY)
        top_ids = np.argsort(-rows, axis=1, kind="stable")[:, :8].astype(np.int32)
        return written_scores(rows, top_ids)


def written_scores(logits: np.ndarray, top_ids: np.ndarray) -> TokenScores:
    """Scores of runs with these logits, [runs, vocabulary], and best tokens, [runs, tops]."""
    top_logits = np.take_along_axis(logits, top_ids, axis=1)
    return TokenScores(logits, top_ids, top_logits, np.log(np.exp(logits - top_logits[:, :1]).sum(axis=1)))


def scores_after(token_ids: Sequence[int]) -> np.ndarray:
    """The scores after these tokens."""
    seed = zlib.crc32(np.asarray(token_ids, np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)


def greedy(prompt: Sequence[int], count: int, source: Sequence[int] = ()) -> list[int]:
    """The best tokens after a prompt, about a source."""
    before = [_MARK + token_id for token_id in source]
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(scores_after([*before, *token_ids]).argmax()))
    return token_ids[len(prompt) :]


def prompt_item(
    spec: ModelSpec,
    prompt: Sequence[int],
    max_new_tokens: int = 8,
    call: Call | None = None,
    work: Work | None = None,
    **options: Any,
) -> ExecuteItem:
    """A prompt, or a source, as the gateway sends it."""
    given = GenerationOptions(max_new_tokens=max_new_tokens, **options)
    sequences = TensorSets(arrays=[{"input_ids": np.array(prompt, np.int32)}])
    completed = complete_options(given, spec, len(prompt))
    return ExecuteItem(call or Call(), ModelKey("small", 1), sequences, completed, work=work or Work())


def tokens_of(prediction: Prediction) -> list[int]:
    """The tokens of the first text."""
    found: list[int] = prediction.outputs.arrays[0]["token_ids"].tolist()
    return found


async def joining(chance: random.Random, generator: TextGenerator, number: int, item: ExecuteItem) -> list[int] | None:
    """The tokens of an item that comes at some time; every fifth is cancelled at some time, and has none."""
    for _ in range(chance.randrange(6)):
        await asyncio.sleep(0)
    task = asyncio.create_task(generator.generate(item))
    if number % 5:
        return tokens_of(await task)
    for _ in range(chance.randrange(40)):
        await asyncio.sleep(0)
    await cancelled(task)
    return None


@asynccontextmanager
async def running_generator(
    decoder: WrittenDecoder, spec: ModelSpec, telemetry: Telemetry | None = None, **settings: Any
) -> AsyncIterator[TextGenerator]:
    """An engine over a decoder, with four sequences at once and eight tokens a step unless `settings` say otherwise."""
    telemetry = telemetry or Telemetry()
    limits: dict[str, Any] = {"max_batch_size": 4, "step_tokens": 8, "max_queue_sequences": 64} | settings
    engine_settings = with_constants(EngineSettings, **limits)
    observer = GenerationObserver(telemetry, spec, "written")
    generator = TextGenerator(decoder, spec, telemetry, observer, lambda: TOKENIZER_JSON, engine_settings)
    async with run_beside(generator.work()):
        try:
            yield generator
        finally:
            await generator.close()
