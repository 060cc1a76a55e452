"""The process that measures one bundle on one back end. It reports to acceptance.py before and after each step, so that
a crash loses nothing.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.settings import Settings
from neuronpipe.core.tensors import Arrays
from neuronpipe.measure.figures import distribution
from neuronpipe.measure.machine import resident_mb
from neuronpipe.stages.neuron_executor.backends import find_backend, load_backend, load_decoder
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, compute
from neuronpipe.stages.neuron_executor.neuron_monitor import NeuronMonitor, running_monitor
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, DecoderRun
from neuronpipe.stages.neuron_executor.runtimes.given_texts import (
    GivenText,
    computed_logits,
    largest_difference,
    largest_logit,
    token_agreement,
)
from neuronpipe.stages.settings import CoreSettings
from neuronpipe.tasks import TASKS


class AcceptSettings(Settings):
    """Settings of `neuronpipe accept`."""

    prefix: ClassVar[str] = "NEURONPIPE_ACCEPT_"

    executor: CoreSettings


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The bundle to measure. Each of `shapes` is measured for `seconds`, on `cores` cores (0: all).

    `batches`, or `texts` for a model that generates, are for the comparison. `environment`: the runtime's variables.
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
    """Returns an error and its cause as text, for the report."""
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" <- {type(cause).__name__}: {cause}" if cause else "")


# Prompts are computed in parts of this number of tokens.
_PART_TOKENS = 64


def generated_parity(model: DecoderModel, texts: Sequence[GivenText]) -> dict[str, Any]:
    """Returns the differences of the model's logits and tokens from the given texts; see acceptance.py."""
    logits = computed_logits(model, texts)
    return {
        "texts": len(texts),
        "cores": 1,
        "largest_output": largest_logit(texts),
        "largest_difference": largest_difference(logits, texts),
        "agreement": token_agreement(logits, texts)[0],
        "largest_difference_of_cores": 0.0,
    }


def sequence_counts(model: DecoderModel, shape: Bucket, source: Sequence[int]) -> list[int]:
    """Returns the numbers of texts to answer side by side: 1, and the shape's number, or as many as the cache has
    room for.

    Raises SetupError if the cache has no room for one text.
    """
    room = (model.blocks - _blocks(model, len(source))) // _blocks(model, shape.tokens)
    if room < 1:
        raise SetupError(f"{shape.tokens} tokens of a text: the cache holds {model.blocks * model.block_tokens}")
    return sorted({1, min(shape.batch, room)})


def token_throughput(
    model: DecoderModel, shape: Bucket, count: int, source: Sequence[int], vocabulary: int, seconds: float
) -> dict[str, float]:
    """Answers `count` texts side by side for a time, each of half the shape's tokens after a prompt of the other half.

    The latency is the time of a step. `source`: for a model with an encoder; all texts share it.
    """
    text_blocks = _blocks(model, shape.tokens)
    source_blocks = list(range(count * text_blocks, count * text_blocks + _blocks(model, len(source))))
    blocks = [range(row * text_blocks, (row + 1) * text_blocks) for row in range(count)]
    if source_blocks:
        model.read(source, source_blocks)

    def runs(first: int, length: int, scored: int) -> Iterator[DecoderRun]:
        ids = [token % vocabulary for token in range(first, first + length)]
        for own_blocks in blocks:
            yield DecoderRun(ids, first, list(own_blocks), scored, len(source), source_blocks)

    prompt, prompt_s, steps = max(1, shape.tokens // 2), list[float](), list[float]()
    end_s = time.monotonic() + seconds
    while not steps or time.monotonic() < end_s:
        parts = (
            run for first in range(0, prompt, _PART_TOKENS) for run in runs(first, min(_PART_TOKENS, prompt - first), 0)
        )
        prompt_s.append(sum(_compute_s(model, [run]) for run in parts))
        for position in range(prompt, shape.tokens):
            steps.append(_compute_s(model, list(runs(position, 1, 1))))
            if time.monotonic() >= end_s:
                break
    prompt_tokens_per_s = round(count * prompt * len(prompt_s) / sum(prompt_s), 1)
    return {**_figures(count * len(steps) / sum(steps), steps), "prompt_tokens_per_s": prompt_tokens_per_s}


def _figures(throughput_per_s: float, latencies_s: Sequence[float]) -> dict[str, float]:
    latencies = distribution(np.array(latencies_s) * 1000)
    assert latencies  # noqa: S101 (there is at least one latency)
    percentiles = {f"p{part}_ms": round(getattr(latencies, f"p{part}"), 3) for part in (50, 95, 99)}
    return {"throughput_per_s": round(throughput_per_s, 1), **percentiles}


def _blocks(model: DecoderModel, tokens: int) -> int:
    return -(-tokens // model.block_tokens)


def _compute_s(model: DecoderModel, runs: Sequence[DecoderRun]) -> float:
    began_s = time.monotonic()
    model.compute(runs)
    return time.monotonic() - began_s


_IN_FLIGHT = (1, 2)
_WARM_UP_RUNS = 10
# Maximum memory for the key-value cache of a model that generates.
_CACHE_BYTES = 1 << 33


class _Findings:
    """The findings so far. The name of each step is sent before it, and all findings after it."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self.values: dict[str, Any] = {"errors": {}}
        # Also sends the outputs of a core for all batches.
        self.send = pipe.send

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Records an error of the block under the name."""
        self.send(name)
        try:
            yield
        except Exception as error:  # in an acceptance test, every error is a finding
            self.values["errors"][name] = str(error) if isinstance(error, SetupError) else error_text(error)
        self.send(self.values)


def measure(pipe: "Connection[Any, Any]", request: MeasureRequest) -> None:
    """Loads, compares and measures: the main function of the process. Errors are provoked last, then None is sent."""
    os.environ.update(request.environment)
    findings, bundle = _Findings(pipe), read_bundle(request.bundle)
    measure_model = _measure_generation if TASKS[bundle.spec.task].generates else _measure
    asyncio.run(measure_model(bundle, request, findings))
    pipe.send(None)


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
            in_flight=1 if find_backend(request.backend).is_one_in_flight else max(_IN_FLIGHT),
            buckets=artifact.buckets,
            versions=artifact.versions,
        )


async def _measure_generation(bundle: Bundle, request: MeasureRequest, findings: _Findings) -> None:
    texts, shapes, loaded = request.texts, request.shapes, list[DecoderModel]()
    with findings.step("load"), _timed_load(findings), _backend_request(bundle, request) as load:
        # The source gets as much room as a text.
        tokens = max(max(shape.batch + 1, len(texts)) * shape.tokens for shape in shapes)
        loaded.append(load_decoder(request.backend, load, max_tokens=tokens, max_bytes=_CACHE_BYTES))
        findings.values |= {"cores": 1, "figures": []}
    async with running_monitor() as monitor:
        for model in loaded:
            with findings.step("compare"):
                findings.values["parity"] = generated_parity(model, texts)
            for shape in shapes:
                with findings.step(f"{shape}"):
                    _check_length(shape, bundle.spec)
                    source, vocabulary = texts[0].source, bundle.spec.vocabulary_size
                    for count in sequence_counts(model, shape, source):
                        figures = token_throughput(model, shape, count, source, vocabulary, request.seconds)
                        findings.values["figures"].append({"shape": str(shape), "in_flight": count, **figures})
        _note_memory(monitor, findings)


@contextlib.contextmanager
def _timed_load(findings: _Findings) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    findings.values["load_s"] = round(time.monotonic() - began_s, 1)


async def _measure(bundle: Bundle, request: MeasureRequest, findings: _Findings) -> None:
    loaded = list[Backend]()
    with findings.step("load"), _timed_load(findings), _backend_request(bundle, request) as load:
        loaded.append(load_backend(request.backend, load))
        findings.values["cores"] = loaded[0].cores
    for backend in loaded:
        with contextlib.closing(backend):
            await _measure_backend(backend, bundle.spec, request, findings)


async def _measure_backend(backend: Backend, spec: ModelSpec, request: MeasureRequest, findings: _Findings) -> None:
    with findings.step("compare"):
        for core in range(backend.cores):
            findings.send([await _compute(backend, core, batch, spec) for batch in request.batches])
    findings.values["figures"] = []
    async with running_monitor() as monitor:
        for shape in request.shapes:
            for in_flight in [count for count in _IN_FLIGHT if count <= backend.in_flight]:
                with findings.step(f"{shape}, {in_flight} in flight"):
                    _check_length(shape, spec)
                    figures = await _throughput(backend, _full_batch(shape, spec), in_flight, request.seconds)
                    findings.values["figures"].append({"shape": str(shape), "in_flight": in_flight, **figures})
        _note_memory(monitor, findings)
    shapes = backend.shapes
    if not isinstance(shapes, BucketPlan):
        return
    with findings.step("provoke errors"):
        findings.values["refusals"] = {}
        larger = Bucket(batch=shapes.largest.batch + 1, tokens=shapes.largest.tokens + (not spec.image))
        refusal = await _error(backend, _full_batch(larger, spec))
        findings.values["refusals"]["a shape that was not compiled, of us"] = refusal
        texts: Callable[[], dict[str, str]] | None = getattr(backend, "error_texts", None)
        if texts:
            findings.values["refusals"] |= await asyncio.to_thread(texts)


def _check_length(shape: Bucket, spec: ModelSpec) -> None:
    if shape.tokens > spec.max_tokens:
        raise SetupError(f"{shape.tokens} tokens, the model takes {spec.token_limit}")


def _note_memory(monitor: NeuronMonitor | None, findings: _Findings) -> None:
    with findings.step("memory"):
        snapshot = monitor.snapshot if monitor else None
        findings.values["device_memory_bytes"] = snapshot.device_memory_bytes if snapshot else None
        findings.values["host_memory_bytes"] = round(resident_mb(os.getpid()) * 1e6)


async def _compute(backend: Backend, core: int, batch: Arrays, spec: ModelSpec) -> dict[str, Any]:
    """Returns the outputs of a batch of any shape up to the model's limit, in as many calls as its rows need."""
    leading = batch[spec.inputs[0]]
    rows, tokens = len(leading), leading.shape[1] if leading.ndim == 2 else spec.image_tokens
    room = backend.shapes.round_tokens(tokens)
    size = backend.shapes.batches(room)[-1] if isinstance(backend.shapes, BucketPlan) else rows
    padding = ((0, 0), (0, room - tokens), *((0, 0),) * (leading.ndim - 2))
    values = {"input_ids": spec.pad_token_id}
    parts = []
    for first in range(0, rows, size):
        taken = {name: batch[name][first : first + size] for name in spec.inputs}
        inputs = {name: np.pad(part, padding, constant_values=values.get(name, 0)) for name, part in taken.items()}
        parts.append(await compute(backend, core, inputs))
    outputs = {output: np.concatenate([part[output.name] for part in parts]) for output in spec.outputs}
    return {
        output.name: array[:, :tokens] if output.axes[:1] == ("tokens",) else array for output, array in outputs.items()
    }


def _full_batch(shape: Bucket, spec: ModelSpec) -> dict[str, Any]:
    """Returns a batch without padding; images are black."""
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
    """Runs full batches on every core for a time, a number of them in flight. The latency is the time of a batch."""
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
