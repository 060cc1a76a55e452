"""CPU time of a token: of the engine alone, and of systems around it whose callers read streams.

The model is tiny, so that most of a token's time is not the model's.

Run: python -m tests.bench.token_cost FOLDER [--callers 16] [--rounds 3]
"""

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TextGenerationInput
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.metrics import Telemetry
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.settings import EngineSettings
from tests.bench.costs import Kind, measure_costs
from tests.bench.generation_alone import TINY, make_item
from tests.bench.systems import ALL, FOUR, run_module, serving_all, serving_four

_PATH = "/neuronpipe.api.v1.InferenceService/Generate"
_PROMPT, _NEW, _TEXTS = 16, 64, 200


async def _measure(folder: Path, callers: int, rounds: int) -> None:
    repository = folder / "repository"
    async with AsyncExitStack() as stack:
        kinds = {"engine alone": Kind([os.getpid()], await stack.enter_async_context(_engine(repository)))}
        for name, serving in ((ALL, serving_all), (FOUR, serving_four)):
            system = stack.enter_context(serving(repository))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(system.target))
            kinds[name] = Kind(system.pids, partial(_read, channel.unary_stream(_PATH)))
        await measure_costs(kinds, _TEXTS, rounds, callers, unit="token", units=_NEW)


async def _read(stream: Any, number: int) -> None:
    options = GenerationOptions(max_new_tokens=_NEW, min_new_tokens=_NEW)
    input = TaskInput(text_generation=TextGenerationInput(prompt=f"{number} {time.time_ns()}", options=options))
    async for _ in stream(InferRequest(model=TINY, input=input).SerializeToString()):
        pass


@asynccontextmanager
async def _engine(repository: Path) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    (bundle,) = read_repository(repository)
    async with running_devices(EngineSettings(), Telemetry()) as devices, devices.open_generator(bundle) as generator:
        stream: Any = SimpleNamespace(put=lambda _: None)

        async def call(number: int) -> None:
            await generator.generate(make_item(bundle.spec, number, _PROMPT, _NEW), stream)

        yield call


def main() -> None:
    """Prints a line for each system."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.token_cost", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (options.folder / "repository").is_dir():
        # A process of its own: torch stays out of the one that measures.
        run_module("-m", "tests.bench.generation_models", str(options.folder), TINY)
    asyncio.run(_measure(options.folder, options.callers, options.rounds))


if __name__ == "__main__":
    main()
