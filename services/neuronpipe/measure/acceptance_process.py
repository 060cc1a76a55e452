"""What the process does that measures one bundle on one back end: it tells acceptance.py of each step before
and after it, so that a crash loses nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from pydantic_settings import SettingsConfigDict

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.measure.figures import distribution
from neuronpipe.stages.neuron_executor.backends import ONE_IN_FLIGHT, load_backend, load_decoder
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, compute
from neuronpipe.stages.neuron_executor.neuron_monitor import NeuronMonitor, running_monitor
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, Run
from neuronpipe.stages.neuron_executor.runtimes.given_texts import (
    GivenText,
    computed_logits,
    largest_difference,
    largest_logit,
    token_agreement,
)
from neuronpipe.stages.settings import CoreSettings
from neuronpipe.tasks import TASKS


class AcceptSettings(CoreSettings):
    """Settings of `neuronpipe accept`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ACCEPT_")


Arrays: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What the process measures. Each of `shapes` is measured for `seconds`, on `cores` cores (0: all).

    `batches`, or `texts` of a model that generates, are for the comparison. `environment`: of the runtime.
    """

    bundle: Path
    backend: str
    cores: int
    shapes: Sequence[Bucket]
    seconds: float
    batches: Sequence[Arrays]
    texts: Sequence[GivenText]
    environment: Mapping[str, str]


def error_text(error: BaseException) -> str:
    """An error and its cause, for the report."""
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" <- {type(cause).__name__}: {cause}" if cause else "")


# Prompts are computed in parts of so many tokens.
_PART_TOKENS = 64


def generated_parity(model: DecoderModel, texts: Sequence[GivenText]) -> dict[str, Any]:
    """How far the model's logits and tokens are from those that were given; see acceptance.py."""
    found = computed_logits(model, texts)
    return {
        "texts": len(texts),
        "cores": 1,
        "largest_output": largest_logit(texts),
        "largest_difference": largest_difference(found, texts),
        "agreement": token_agreement(found, texts)[0],
        "largest_difference_of_cores": 0.0,
    }


def sequence_counts(model: DecoderModel, shape: Bucket, source: Sequence[int]) -> list[int]:
    """How many texts are to be answered side by side: one, and as many as the shape says or the cache has room for.

    Raises SetupError where it has none.
    """
    room = (model.blocks - _blocks(model, len(source))) // _blocks(model, shape.tokens)
    if room < 1:
        raise SetupError(f"{shape.tokens} tokens of a text: the cache holds {model.blocks * model.block_tokens}")
    return sorted({1, min(shape.batch, room)})


def token_throughput(
    model: DecoderModel, shape: Bucket, count: int, source: Sequence[int], vocabulary: int, seconds: float
) -> dict[str, float]:
    """Answers so many texts side by side for a time, each of half the shape's tokens after a prompt of the other half.

    Latency is that of a step. `source`: of a model with an encoder; all texts share it.
    """
    held = _blocks(model, shape.tokens)
    of_source = list(range(count * held, count * held + _blocks(model, len(source))))
    blocks = [range(row * held, (row + 1) * held) for row in range(count)]
    if of_source:
        model.read(source, of_source)

    def runs(first: int, length: int, scored: int) -> Iterator[Run]:
        ids = [token % vocabulary for token in range(first, first + length)]
        for own in blocks:
            yield Run(ids, first, list(own), scored, len(source), of_source)

    prompt, prompt_s, steps = max(1, shape.tokens // 2), list[float](), list[float]()
    end_s = time.monotonic() + seconds
    while not steps or time.monotonic() < end_s:
        parts = range(0, prompt, _PART_TOKENS)
        prompt_s.append(
            sum(
                _timed(lambda run=run: model.compute([run]))  # type: ignore[misc]
                for first in parts
                for run in runs(first, min(_PART_TOKENS, prompt - first), 0)
            )
        )
        for position in range(prompt, shape.tokens):
            step = list(runs(position, 1, 1))
            steps.append(_timed(lambda step=step: model.compute(step)))  # type: ignore[misc]
            if time.monotonic() >= end_s:
                break
    prompt_tokens_per_s = round(count * prompt * len(prompt_s) / sum(prompt_s), 1)
    return {**_figures(count * len(steps) / sum(steps), steps), "prompt_tokens_per_s": prompt_tokens_per_s}


def _figures(throughput_per_s: float, latencies_s: Sequence[float]) -> dict[str, float]:
    found = distribution(np.array(latencies_s) * 1000)
    assert found  # noqa: S101 (there is one at least)
    percentiles = {f"p{part}_ms": round(getattr(found, f"p{part}"), 3) for part in (50, 95, 99)}
    return {"throughput_per_s": round(throughput_per_s, 1), **percentiles}


def _blocks(model: DecoderModel, tokens: int) -> int:
    return -(-tokens // model.block_tokens)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


_IN_FLIGHT = (1, 2)
_WARM_UP_RUNS = 10
# The most for the key-value cache of a model that generates.
_CACHE_BYTES = 1 << 33


class _Findings:
    """The findings so far. Told is the name of each step before it, and all findings after it."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.values: dict[str, Any] = {"errors": {}}
        self._pipe = pipe

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Records an error of the block under the name."""
        self._pipe.send(name)
        try:
            yield
        except SetupError as error:
            self.values["errors"][name] = str(error)
        except Exception as error:  # in an acceptance test, every error is a finding
            self.values["errors"][name] = error_text(error)
        self._pipe.send(self.values)

    def tell_outputs(self, outputs: list[dict[str, Any]]) -> None:
        """The outputs of a core for all batches."""
        self._pipe.send(outputs)


def measure(pipe: "Connection[Any, Any]", request: MeasureRequest) -> None:
    """The main function of the process: loads, compares and measures. Errors are provoked last. Ends with a None."""
    os.environ.update(request.environment)
    found, bundle = _Findings(pipe), read_bundle(request.bundle)
    if TASKS[bundle.spec.task].generates:
        asyncio.run(_measure_generation(bundle, request, found))
    else:
        loaded = list[tuple[Backend, ModelSpec]]()
        with found.step("load"):
            loaded.append(_load(bundle, request, found))
        for backend, spec in loaded:
            try:
                asyncio.run(_measure(backend, spec, request, found))
            finally:
                backend.close()
    pipe.send(None)


def _load(bundle: Bundle, request: MeasureRequest, found: _Findings) -> tuple[Backend, ModelSpec]:
    began_s = time.monotonic()
    with _backend_request(bundle, request) as load:
        backend = load_backend(request.backend, load)
    found.values |= {"load_s": round(time.monotonic() - began_s, 1), "cores": backend.cores}
    return backend, bundle.spec


@contextlib.contextmanager
def _backend_request(bundle: Bundle, request: MeasureRequest) -> Iterator[BackendRequest]:
    artifact = bundle.artifact(request.backend)
    with bundle.artifact_files(artifact) as files:
        yield BackendRequest(
            bundle.spec,
            files,
            artifact.properties,
            cores=request.cores,
            threads=0,
            pipeline_cores=artifact.pipeline_cores,
            in_flight=1 if request.backend in ONE_IN_FLIGHT else max(_IN_FLIGHT),
            buckets=artifact.buckets,
            versions=artifact.versions,
        )


async def _measure_generation(bundle: Bundle, request: MeasureRequest, found: _Findings) -> None:
    texts, shapes, loaded = request.texts, request.shapes, list[DecoderModel]()
    with found.step("load"):
        began_s = time.monotonic()
        # A source has as much room as a text.
        tokens = max(max(shape.batch + 1, len(texts)) * shape.tokens for shape in shapes)
        with _backend_request(bundle, request) as load:
            loaded.append(load_decoder(request.backend, load, max_tokens=tokens, max_bytes=_CACHE_BYTES))
        found.values |= {"load_s": round(time.monotonic() - began_s, 1), "cores": 1, "figures": []}
    async with running_monitor() as monitor:
        for model in loaded:
            with found.step("compare"):
                found.values["parity"] = generated_parity(model, texts)
            for shape in shapes:
                with found.step(f"{shape}"):
                    _check_length(shape, bundle.spec)
                    source, vocabulary = texts[0].source, bundle.spec.vocabulary_size
                    for count in sequence_counts(model, shape, source):
                        figures = token_throughput(model, shape, count, source, vocabulary, request.seconds)
                        found.values["figures"].append({"shape": str(shape), "in_flight": count, **figures})
        _note_memory(monitor, found)


async def _measure(backend: Backend, spec: ModelSpec, request: MeasureRequest, found: _Findings) -> None:
    with found.step("compare"):
        for core in range(backend.cores):
            found.tell_outputs([await _compute(backend, core, batch, spec) for batch in request.batches])
    found.values["figures"] = []
    async with running_monitor() as monitor:
        for shape in request.shapes:
            for in_flight in [count for count in _IN_FLIGHT if count <= backend.in_flight]:
                with found.step(f"{shape}, {in_flight} in flight"):
                    _check_length(shape, spec)
                    figures = await _throughput(backend, _full_batch(shape, spec), in_flight, request.seconds)
                    found.values["figures"].append({"shape": str(shape), "in_flight": in_flight, **figures})
        _note_memory(monitor, found)
    if not backend.buckets:
        return
    with found.step("provoke errors"):
        found.values["refusals"] = {}
        largest = backend.buckets.largest
        larger = Bucket(batch=largest.batch + 1, tokens=largest.tokens + (0 if spec.image else 1))
        found.values["refusals"]["a shape that was not compiled, of us"] = await _error(
            backend, _full_batch(larger, spec)
        )
        texts: Callable[[], dict[str, str]] | None = getattr(backend, "error_texts", None)
        if texts:
            found.values["refusals"] |= await asyncio.to_thread(texts)


def _check_length(shape: Bucket, spec: ModelSpec) -> None:
    if shape.tokens > spec.max_tokens:
        raise SetupError(f"{shape.tokens} tokens, the model takes {spec.token_limit}")


def _note_memory(monitor: NeuronMonitor | None, found: _Findings) -> None:
    with found.step("memory"):
        snapshot = monitor.snapshot if monitor else None
        found.values["device_memory_bytes"] = snapshot.device_memory_bytes if snapshot else None
        found.values["host_memory_bytes"] = psutil.Process().memory_info().rss


async def _compute(backend: Backend, core: int, batch: Arrays, spec: ModelSpec) -> dict[str, Any]:
    """The outputs of a batch of any shape up to the model's limit, in as many calls as its rows need."""
    leading = batch[spec.inputs[0]]
    rows, tokens = len(leading), leading.shape[1] if leading.ndim == 2 else spec.image_tokens
    room = backend.round_tokens(tokens)
    size = backend.buckets.batches(room)[-1] if backend.buckets else rows
    parts = []
    for first in range(0, rows, size):
        inputs = {
            name: np.pad(
                batch[name][first : first + size],
                ((0, 0), (0, room - tokens), *((0, 0),) * (leading.ndim - 2)),
                constant_values=spec.pad_token_id if name == "input_ids" else 0,
            )
            for name in spec.inputs
        }
        parts.append(await compute(backend, core, inputs))
    outputs = {output.name: np.concatenate([part[output.name] for part in parts]) for output in spec.outputs}
    return {
        output.name: outputs[output.name][:, :tokens] if output.axes[:1] == ("tokens",) else outputs[output.name]
        for output in spec.outputs
    }


def _full_batch(shape: Bucket, spec: ModelSpec) -> dict[str, Any]:
    """A batch without padding; of images, which are black."""
    if spec.image and "input_ids" not in spec.inputs:
        return {name: np.zeros((shape.batch, 3, *spec.image.size), np.uint8) for name in spec.inputs}
    rows = {
        "input_ids": np.arange(shape.tokens, dtype=np.int64) % spec.vocabulary_size,
        "attention_mask": np.ones(shape.tokens, np.int64),
        "token_type_ids": np.zeros(shape.tokens, np.int64),
    }
    return {name: np.tile(rows[name], (shape.batch, 1)) for name in spec.inputs}


async def _error(backend: Backend, batch: Arrays) -> str:
    try:
        await compute(backend, 0, batch)
    except BackendError as error:
        return error_text(error)
    return "NOT REFUSED"


async def _throughput(backend: Backend, batch: Arrays, in_flight: int, seconds: float) -> dict[str, float]:
    """Runs full batches on every core for a time, with a number of batches in flight. Latency is that of a batch."""
    latencies = list[float]()

    async def call(core: int, end_s: float) -> None:
        is_first = True
        while is_first or time.monotonic() < end_s:
            began_s = time.monotonic()
            await compute(backend, core, batch)
            latencies.append(time.monotonic() - began_s)
            is_first = False

    for core in range(backend.cores):
        for _ in range(_WARM_UP_RUNS):
            await compute(backend, core, batch)
    began_s = time.monotonic()
    await asyncio.gather(*(call(core, began_s + seconds) for core in range(backend.cores) for _ in range(in_flight)))
    took_s = time.monotonic() - began_s
    return _figures(len(next(iter(batch.values()))) * len(latencies) / took_s, latencies)
