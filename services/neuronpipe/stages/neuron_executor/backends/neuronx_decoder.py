"""Text generation on AWS Neuron: a decoder with its cache on one core, and its encoder, if it has one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, CoreLost, ResultT
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.stages.neuron_executor.backends.neuronx_traces import check_versions, load_trace
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, Scores
from neuronpipe.stages.neuron_executor.runtimes.neuron import core_count
from neuronpipe.stages.neuron_executor.runtimes.slots import CHUNK_PROPERTY, SlotModel, encoder_file

_STATE_AXES = 4


def load_slots(request: BackendRequest) -> SlotModel:
    """The model on the next core in turn that computes. Raises SetupError."""
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

    What sources were read to are states of the steps' trace, which this process writes, as AWS's tutorial of T5 does.
    """

    def __init__(self, path: Path, encoder: Path | None, core: int, slots: int, chunk_tokens: int) -> None:
        self._trace = load_trace(path, core, has_states=True)
        self._encoder = load_trace(encoder, core) if encoder else None
        self._core = core
        self._runtime = neuron_runtime()
        # In turns, slot by slot. States of texts are of all slots; weights that are outside of a trace have fewer axes.
        states = self._trace.parameters() if encoder else ()
        self._sources = [one for one in states if one.dim() == _STATE_AXES and one.shape[0] == 1]
        # Changes no slot.
        self._idle = [
            np.zeros((1, slots + chunk_tokens), np.int64),
            np.full(slots, -1, np.int64),
            np.zeros(3, np.int64),
            np.arange(slots, dtype=np.int64),
        ]
        if encoder:
            self._idle.append(np.array([[0, 1]] * (slots + 1)))

    def execute(self, *inputs: NDArray[np.int64]) -> Scores:
        """See SlotGraph."""
        return self._guarded(lambda: self._run(*inputs), "a step")

    def read(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        """See SlotGraph."""
        self._guarded(lambda: self._read_source(token_ids, count, slot), "what a source is read to")

    def _guarded(self, work: Callable[[], ResultT], what: str) -> ResultT:
        try:
            self._runtime.check(self._core)
            return work()
        except CoreLost as error:
            raise DecoderLost(str(error)) from error
        except (RuntimeError, ValueError) as error:
            if self._runtime.is_fatal(error) or not self.is_well():
                raise DecoderLost(str(self._runtime.lose(self._core, error))) from error
            raise RuntimeError(f"core {self._core} could not compute {what}") from error

    def _run(self, *inputs: NDArray[np.int64]) -> Scores:
        # A trace may give its states, too, behind the others.
        scores = self._trace(*map(torch.from_numpy, inputs))[: len(Scores._fields)]
        return Scores._make(score.numpy() for score in scores)

    def _read_source(self, token_ids: NDArray[np.int64], count: int, slot: int) -> None:
        trace: Any = self._encoder
        computed = trace(torch.from_numpy(token_ids), torch.tensor([count]))
        for state, new in zip(self._sources[slot * len(computed) :], computed, strict=False):
            state.copy_(new[None])

    def is_well(self) -> bool:
        """Whether the core still computes a step of nothing. It tells a bad step from a bad core after a failure."""
        try:
            self._runtime.check(self._core)
            self._run(*self._idle)
        except (CoreLost, RuntimeError, ValueError):
            return False
        return True
