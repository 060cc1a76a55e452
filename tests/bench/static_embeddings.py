"""Texts a second of static embeddings over gRPC, as CPU time a text: of `serve all`, and of the client.

Run: `python -m tests.bench.static_embeddings [--lists 32,256,1024] [--seconds 4] [--callers 4]`

The model is a random table in model2vec's form, with word pieces of the Python manual, whose texts are cut to eight
words. The CPUs are shared with the client, so the capacity of two cores is computed from the server's CPU time.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import AsyncClient
from neuronpipe.measure.load.inputs import builtin_texts
from neuronpipe.measure.machine import cpu_seconds
from tests.bench.systems import run_module, serving_all

_MODEL = "static"
_WIDTH, _VOCABULARY, _WORDS = 256, 20_000, 8
_CORES = 2
# The most requests of a batch.
_BATCH = 256
_Send = Callable[[AsyncClient, Sequence[str]], Awaitable[None]]


def _write_model(folder: Path, texts: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=_VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), _WIDTH), np.float32)
    safetensors.numpy.save_file({"embeddings": table}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))


async def _one_by_one(client: AsyncClient, texts: Sequence[str]) -> None:
    """InferBatch with a request for each text."""
    requests = [
        InferRequest(model=_MODEL, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text)))
        for text in texts
    ]
    for outcome in await client.infer_batch(requests):
        if outcome.HasField("error"):
            raise RuntimeError(outcome.error.message)


async def _together(client: AsyncClient, texts: Sequence[str]) -> None:
    """Infer with a list of texts."""
    if (await client.embed_texts(_MODEL, texts)).shape != (len(texts), _WIDTH):
        raise RuntimeError("vectors of another shape")


async def _measure(target: str, pid: int, texts: Sequence[str], options: argparse.Namespace) -> None:
    ways: dict[str, _Send] = {"a request a text": _one_by_one, "a request a list": _together}
    async with AsyncClient(target) as client:
        for size in options.lists:
            for name, send in ways.items():
                if size > _BATCH and send is _one_by_one:
                    continue
                lists = [texts[start : start + size] for start in range(0, len(texts) - size + 1, size)]
                await _turn(client, send, lists, options.callers, options.seconds / 4)
                before_s, client_s, began_s = cpu_seconds([pid]), time.process_time(), time.perf_counter()
                done = await _turn(client, send, lists, options.callers, options.seconds)
                wall_s = time.perf_counter() - began_s
                server_us = 1e6 * (cpu_seconds([pid]) - before_s) / done
                client_us = 1e6 * (time.process_time() - client_s) / done
                print(
                    f"{name}, {size} texts a call: {server_us:.1f} µs of CPU time a text, which is "
                    f"{_CORES * 1e6 / server_us:.0f} texts/s on {_CORES} cores; client {client_us:.1f} µs; "
                    f"{done / wall_s:.0f} texts/s seen"
                )


async def _turn(client: AsyncClient, send: _Send, lists: Sequence[Sequence[str]], callers: int, seconds: float) -> int:
    """The texts whose vectors came within some seconds."""
    until_s, done = time.perf_counter() + seconds, 0

    async def call(number: int) -> None:
        nonlocal done
        while time.perf_counter() < until_s:
            number += 1
            chosen = lists[number % len(lists)]
            await send(client, chosen)
            done += len(chosen)

    await asyncio.gather(*map(call, range(callers)))
    return done


def main() -> None:
    """Prints a line for each way and size of list."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.static_embeddings", description=__doc__)
    parser.add_argument("--lists", type=lambda text: [*map(int, text.split(","))], default=[32, 256, 1024])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--callers", type=int, default=4)
    options = parser.parse_args()
    # Twice, cut at other words, so that there are enough for the longest list.
    words = [text.split() for text in builtin_texts(0)]
    texts = [" ".join(some[at : at + _WORDS]) for at in (0, 3) for some in words if len(some) > 3]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_model(folder / "source", texts)
        compiled = ("--name", _MODEL, "--repository", str(folder / "models"))
        run_module("-m", "neuronpipe", "compile", str(folder / "source"), *compiled)
        with serving_all(folder / "models") as system:
            asyncio.run(_measure(system.target, system.pids[0], texts, options))


if __name__ == "__main__":
    main()
