"""What generates texts without a pipeline, each in a process of its own: transformers, and our engine."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ExecuteItem, ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.platform.process.worker import Worker
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.text_options import complete_options
from tests.bench.load import send_all
from tests.bench.peers.generating import BEAMS, Prompts, measure

LLAMA, BART, TINY = "llama", "bart", "tiny"
# The same with a token that ends its texts, as forms of texts need it.
ENDING = "llama-ending"
VOCABULARY = 1200
# Tokens before these are special.
FIRST_WORD = 3
# After it, as many callers as there are have their turns in the steps.
WARM_UP_S = 1.0

# (model, tokens of a prompt, new tokens, callers, seconds)
_Order: TypeAlias = tuple[str, int, int, int, float]
_Pipe: TypeAlias = "Connection[float, _Order]"


class Alone:
    """The process, as its parent sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def measure(self, model: str, prompt_tokens: int, new_tokens: int, callers: int, seconds: float) -> float:
        """New tokens a second. It generates whole texts, once at least, until the seconds have passed."""
        self._worker.send((model, prompt_tokens, new_tokens, callers, seconds))
        return float(self._worker.receive())


@contextmanager
def running_alone(serve: Callable[[_Pipe, Path], None], folder: Path) -> Iterator[Alone]:
    """A process that runs `serve` on the models of a folder; ended with the block."""
    with Worker.started(serve, folder, name="alone") as worker:
        yield Alone(worker)


def serve_transformers(pipe: _Pipe, folder: Path) -> None:
    """`generate` on batches of as many prompts as there are callers: greedy, and of BART with beams."""
    import torch
    import transformers

    kinds = {LLAMA: transformers.AutoModelForCausalLM, BART: transformers.AutoModelForSeq2SeqLM}
    models: dict[str, Any] = {
        name: kind.from_pretrained(folder / "sources" / name, dtype=torch.float32).eval()
        for name, kind in kinds.items()
    }

    def generate(name: str, prompts: Prompts, new_tokens: int) -> Prompts:
        given = torch.tensor(prompts)
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        how = {"num_beams": BEAMS if name == BART else 1, "do_sample": False, "pad_token_id": 1, **lengths}
        with torch.inference_mode():
            made: Prompts = models[name].generate(given, attention_mask=torch.ones_like(given), **how)
        return [text[-new_tokens:] for text in made]

    while True:
        name, prompt_tokens, new_tokens, callers, seconds = pipe.recv()
        words = (FIRST_WORD, VOCABULARY)
        pipe.send(measure(partial(generate, name), words, prompt_tokens, new_tokens, callers, seconds))


def serve_engine(pipe: _Pipe, folder: Path, model: str = LLAMA) -> None:
    """The executor's engine with a model, with as many callers as coroutines of its event loop."""
    asyncio.run(_serve_engine(pipe, folder, model))


async def _serve_engine(pipe: _Pipe, folder: Path, model: str) -> None:
    bundles = {bundle.spec.name: bundle for bundle in read_repository(folder / "repository")}
    bundle = bundles[model]
    numbers = itertools.count()
    async with running_devices(EngineSettings(), Telemetry()) as devices, devices.open_generator(bundle) as generator:
        while True:
            _, prompt_tokens, new_tokens, callers, seconds = await asyncio.to_thread(pipe.recv)
            tokens = 0
            began_s = time.perf_counter() + WARM_UP_S

            def count(new: NewTokens, began_s: float = began_s, ends_s: float = began_s + seconds) -> None:
                nonlocal tokens
                if began_s <= time.perf_counter() < ends_s:
                    tokens += len(new.token_ids)

            stream: Any = SimpleNamespace(put=count)
            items = (make_item(bundle.spec, number, prompt_tokens, new_tokens) for number in numbers)
            call = partial(_generate, generator, stream)
            await send_all(call, items, callers=callers, seconds=WARM_UP_S + seconds)
            pipe.send(tokens / seconds)


async def _generate(generator: Any, stream: Any, item: ExecuteItem) -> None:
    await generator.generate(item, stream)


def make_item(spec: ModelSpec, number: int, prompt_tokens: int, new_tokens: int) -> ExecuteItem:
    prompt = np.random.default_rng(number).integers(FIRST_WORD, VOCABULARY, prompt_tokens, np.int32)
    given = GenerationOptions(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    options = complete_options(given, spec, prompt_tokens)
    sequences = TensorSets(arrays=[{"input_ids": prompt}])
    return ExecuteItem(Call(), ModelKey(spec.name, spec.version), sequences, options)
