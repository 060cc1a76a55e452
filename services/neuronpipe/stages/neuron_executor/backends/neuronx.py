"""AWS Neuron: each NeuronCore has a replica of the model, or a part of a replica, with a trace for each bucket.

A generating model is a decoder with its cache on one core, and its encoder if the model has an encoder.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neuronpipe.bundles.buckets import Bucket, BucketPlan, bucket_inputs, cut_bucket, fill_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import (
    BackendError,
    BackendRequest,
    CoreLost,
    Finish,
    Prepare,
    ResultT,
    check_shapes,
)
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import check_versions, load_trace, neuron_runtime
from neuronpipe.stages.neuron_executor.backends.part_turns import PartTurns
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, TokenScores
from neuronpipe.stages.neuron_executor.runtimes.neuron import core_count
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN, check_parts, part_names
from neuronpipe.stages.neuron_executor.runtimes.slots import CHUNK_PROPERTY, SlotModel, encoder_file


class NeuronxBackend:
    """See Backend. A core has one execution at a time.

    With two batches in flight, the second batch waits in the runtime with prepared inputs.
    """

    lone_graphs: Mapping[int, int] = MappingProxyType({})

    def __init__(self, request: BackendRequest) -> None:
        self._name = request.spec.name
        self._inputs, self._image = request.spec.inputs, request.spec.image
        self._outputs = [output.name for output in request.spec.outputs]
        self._per_token = {output.name for output in request.spec.outputs if output.axes[:1] == ("tokens",)}
        self._pad_token_id = request.spec.pad_token_id
        self._vocabulary_size = request.spec.vocabulary_size
        self.in_flight = request.in_flight
        self.shapes = BucketPlan(request.buckets)
        self._runtime = neuron_runtime()
        check_versions(request.spec.name, request.versions)
        self.cores = core_count(request.cores)
        parts = request.pipeline_cores
        check_parts(self._name, parts, self.cores, leaves_none=True)
        self._turns = PartTurns(self._name, parts, self.cores)
        files = {path.name: path for path in request.files}
        names = {bucket: part_names(str(bucket), parts) for bucket in self.shapes.buckets}
        # For each bucket, the inputs of each part.
        self._part_inputs = {
            bucket: [self._read_inputs(bucket, name, files) for name in names[bucket]] for bucket in names
        }
        # On each core, the trace of the model or of its part for each bucket.
        self._loaded = [
            {bucket: load_trace(files[f"{names[bucket][core % parts]}.pt"], core) for bucket in names}
            for core in range(self.cores)
        ]
        self._threads = ThreadPoolExecutor(self.cores * self.in_flight, thread_name_prefix=f"core-{self._name}")

    def _read_inputs(self, bucket: Bucket, name: str, files: dict[str, Path]) -> dict[str, list[int]]:
        """Reads the shapes of a trace's inputs, in order."""
        try:
            stamp = json.loads(files[f"{name}.json"].read_text())
            described = {entry["name"]: entry["shape"] for entry in stamp["inputs"]}
        except (KeyError, TypeError, ValueError) as error:
            raise SetupError(
                f"model {self._name!r}: its neuronx artefact lacks the bucket {bucket}; compile it again"
            ) from error
        inputs = bucket_inputs(self._inputs, bucket, self._image)
        expected = {input_name: shape for input_name, (shape, _) in inputs.items()}
        if self._turns.parts > 1:
            hidden = {HIDDEN: described[HIDDEN]} if HIDDEN in described else {}
            expected = {input_name: (hidden | expected).get(input_name, []) for input_name in described}
        if f"{name}.pt" not in files or list(described.items()) != list(expected.items()):
            raise SetupError(
                f"model {self._name!r}: the bucket {bucket} was compiled for other inputs than the model's; "
                "compile it again"
            )
        return described

    @property
    def part_ns(self) -> Sequence[int]:
        return self._turns.part_ns

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: finish(self._compute(core, prepare()))
        )

    def _compute(self, core: int, inputs: Arrays) -> dict[str, Array]:
        check_shapes(inputs)
        shape = next(iter(inputs.values())).shape
        rows, tokens = shape[0], self._image.tokens if self._image else shape[1]
        bucket = self.shapes.find(rows, tokens)
        if bucket is None:
            raise BackendError(
                f"no bucket holds {rows} x {tokens} tokens; there are: {', '.join(map(str, self.shapes.buckets))}"
            )
        filled = fill_bucket(inputs, bucket, self._pad_token_id)
        values = {name: torch.from_numpy(filled[name]) for name in self._inputs}
        cores = self._turns.cores_of(core)
        outputs: tuple[torch.Tensor, ...] = ()
        for part_core, names in zip(cores, self._part_inputs[bucket], strict=True):
            with self._turns.take(part_core):
                self._runtime.check(part_core)
                # By position, because a trace has no names.
                outputs = self._execute(part_core, bucket, tuple(values[name] for name in names))
            values[HIDDEN] = outputs[0]
        arrays = {name: output.float().numpy() for name, output in zip(self._outputs, outputs, strict=True)}
        return {
            name: array[:, :tokens] if name in self._per_token else array
            for name, array in cut_bucket(arrays, rows).items()
        }

    def _execute(self, core: int, bucket: Bucket, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        try:
            outputs: tuple[torch.Tensor, ...] = self._loaded[core][bucket](*tensors)
            return outputs
        except (RuntimeError, ValueError) as error:
            if self._runtime.is_fatal(error) or not self._is_well(core):
                raise self._runtime.lose(core, error) from error
            raise BackendError(f"core {core} could not compute a batch of the bucket {bucket}") from error

    def _is_well(self, core: int) -> bool:
        """Returns whether a core still computes a batch that it has computed before.

        After a failure, this distinguishes a bad batch from a bad core.
        """
        bucket = self.shapes.buckets[0]
        values = {"input_ids": self._pad_token_id, "attention_mask": 1}
        try:
            self._loaded[core][bucket](*self._example(core, bucket, values))
        except (RuntimeError, ValueError):
            return False
        return True

    def _example(self, core: int, bucket: Bucket, values: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        """Fills each input with a value, given by its name, or with 0."""
        dtypes = {name: dtype for name, (_, dtype) in bucket_inputs(self._inputs, bucket, self._image).items()}
        shapes = self._part_inputs[bucket][core % self._turns.parts]
        return tuple(
            torch.full(shape, values.get(name, 0), dtype=getattr(torch, dtypes.get(name, "float32")))
            for name, shape in shapes.items()
        )

    def error_texts(self) -> dict[str, str]:
        """Collects the SDK's error texts for inputs that break its contract, for the acceptance report.

        The SDK's documents do not contain all of these texts.
        """
        bucket = self.shapes.buckets[0]
        good = self._example(0, bucket, dict.fromkeys(self._inputs, 1))
        wrong_inputs = {
            "another shape": tuple(tensor[:, 1:] for tensor in good),
            "another dtype": tuple(tensor.int() for tensor in good),
            "an input too few": good[1:],
        }
        if self._image is None:
            beyond = torch.full_like(good[0], self._vocabulary_size)
            wrong_inputs["a token id beyond the vocabulary"] = (beyond, *good[1:])
        texts = {}
        for name, tensors in wrong_inputs.items():
            try:
                self._loaded[0][bucket](*tensors)
                texts[name] = "NOT REFUSED"
            except Exception as error:  # the report names every error
                texts[name] = f"{type(error).__name__}: {error}"
        return texts

    def close(self) -> None:
        """See Backend. The device keeps the models until the process ends, because the SDK keeps them."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._loaded.clear()


_STATE_AXES = 4


def load_decoder(request: BackendRequest, *, max_tokens: int, max_bytes: int) -> SlotModel:
    """Loads a generating model onto a core: cores take turns, and dead cores are skipped. See the package."""
    name = request.spec.name
    check_versions(name, request.versions)
    files = {path.name: path for path in request.files}
    try:
        (bucket,) = request.buckets
        path, encoder = files[f"{bucket}.pt"], files.get(f"{encoder_file(bucket)}.pt")
        chunk_tokens = int(request.properties[CHUNK_PROPERTY])
    except (KeyError, ValueError) as error:
        raise SetupError(f"model {name!r}: its neuronx artefact lacks its slots; compile it again") from error
    cores = core_count(request.cores)
    for _ in range(cores):
        core = neuron_runtime().take_turn(cores)
        graph = _NeuronGraph(path, encoder, core, bucket.batch, chunk_tokens)
        if graph.is_well():
            return SlotModel(graph, bucket.batch, bucket.tokens, chunk_tokens)
        log_warning("core is dead at the start", model=name, core=core)
    raise SetupError(f"model {name!r}: none of the {cores} cores computes")


class _NeuronGraph:
    """See SlotGraph.

    The keys and values of sources are states of the steps' trace, which this process writes, as in AWS's T5 tutorial.
    """

    def __init__(self, path: Path, encoder: Path | None, core: int, slots: int, chunk_tokens: int) -> None:
        self._trace = load_trace(path, core, has_states=True)
        self._encoder = load_trace(encoder, core) if encoder else None
        self._core = core
        self._runtime = neuron_runtime()
        # States of sources are of one slot each, and sorted by slot. States of texts are of all slots. Weights outside
        # of a trace have fewer axes.
        states = self._trace.parameters() if encoder else ()
        self._sources = [state for state in states if state.dim() == _STATE_AXES and state.shape[0] == 1]
        # The inputs of a step that changes no slot.
        self._idle = [
            np.zeros((1, slots + chunk_tokens), np.int64),
            np.full(slots, -1, np.int64),
            np.zeros(3, np.int64),
            np.arange(slots, dtype=np.int64),
        ]
        if encoder:
            self._idle.append(np.array([[0, 1]] * (slots + 1)))

    def execute(self, *inputs: NDArray[np.int64]) -> TokenScores:
        return self._guarded(lambda: self._run(*inputs), "a step")

    def read(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        self._guarded(lambda: self._read_source(token_ids, count, slot), "what a source is read to")

    def _guarded(self, work: Callable[[], ResultT], name: str) -> ResultT:
        try:
            self._runtime.check(self._core)
            return work()
        except CoreLost as error:
            raise DecoderLost(str(error)) from error
        except (RuntimeError, ValueError) as error:
            if self._runtime.is_fatal(error) or not self.is_well():
                raise DecoderLost(str(self._runtime.lose(self._core, error))) from error
            raise RuntimeError(f"core {self._core} could not compute {name}") from error

    def _run(self, *inputs: NDArray[np.int64]) -> TokenScores:
        # A trace may also return its states, behind the scores.
        scores = self._trace(*map(torch.from_numpy, inputs))[: len(TokenScores._fields)]
        return TokenScores._make(score.numpy() for score in scores)

    def _read_source(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        trace: Any = self._encoder
        computed = trace(torch.from_numpy(token_ids), torch.tensor([count]))
        for state, new in zip(self._sources[slot * len(computed) :], computed, strict=False):
            state.copy_(new[None])

    def is_well(self) -> bool:
        """Returns whether the core still computes an empty step.

        After a failure, this distinguishes a bad step from a bad core.
        """
        try:
            self._runtime.check(self._core)
            self._run(*self._idle)
        except (CoreLost, RuntimeError, ValueError):
            return False
        return True
