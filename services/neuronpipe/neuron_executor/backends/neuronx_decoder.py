"""Text generation on AWS Neuron: a decoder with its cache on one core."""

import numpy as np
import torch
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.neuron_executor.backends.base import BackendRequest, CoreLost
from neuronpipe.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.neuron_executor.backends.neuronx_traces import check_versions, load_trace
from neuronpipe.runtimes.decoder import DecoderLost, Scores
from neuronpipe.runtimes.neuron import core_count
from neuronpipe.runtimes.slots import CHUNK_PROPERTY, SlotModel


def load_slots(request: BackendRequest) -> SlotModel:
    """The model on the next core in turn that computes. Raises SetupError."""
    name = request.spec.name
    check_versions(name, request.versions)
    try:
        (bucket,) = request.buckets
        (path,) = (path for path in request.files if path.name == f"{bucket}.pt")
        chunk_tokens = int(request.properties[CHUNK_PROPERTY])
    except (KeyError, ValueError) as error:
        raise SetupError(f"model {name!r}: its neuronx artefact lacks its slots; compile it again") from error
    cores = core_count(request.cores)
    for _ in range(cores):
        core = neuron_runtime().take_turn(cores)
        graph = _NeuronGraph(load_trace(path, core, has_states=True), core, bucket.batch, chunk_tokens)
        if graph.is_well():
            return SlotModel(graph, bucket.batch, bucket.tokens, chunk_tokens)
        log_warning("core is dead at the start", model=name, core=core)
    raise SetupError(f"model {name!r}: none of the {cores} cores computes")


class _NeuronGraph:
    """See SlotGraph."""

    def __init__(self, trace: torch.jit.ScriptModule, core: int, slots: int, chunk_tokens: int) -> None:
        self._trace = trace
        self._core = core
        self._runtime = neuron_runtime()
        # Changes no slot.
        self._idle = (
            np.zeros((1, slots + chunk_tokens), np.int64),
            np.full(slots, -1, np.int64),
            np.zeros(3, np.int64),
            np.arange(slots, dtype=np.int64),
        )

    def execute(
        self,
        token_ids: NDArray[np.int64],
        past: NDArray[np.int64],
        chunk: NDArray[np.int64],
        sources: NDArray[np.int64],
    ) -> Scores:
        """See SlotGraph."""
        try:
            self._runtime.check(self._core)
            return self._run(token_ids, past, chunk, sources)
        except CoreLost as error:
            raise DecoderLost(str(error)) from error
        except (RuntimeError, ValueError) as error:
            if self._runtime.is_fatal(error) or not self.is_well():
                raise DecoderLost(str(self._runtime.lose(self._core, error))) from error
            raise RuntimeError(f"core {self._core} could not compute a step") from error

    def _run(self, *inputs: NDArray[np.int64]) -> Scores:
        # A trace may give its states, too, behind the others.
        logits, top_ids, top_logits = self._trace(*map(torch.from_numpy, inputs))[:3]
        return Scores(logits.numpy(), top_ids.numpy(), top_logits.numpy())

    def is_well(self) -> bool:
        """Whether the core still computes a step of nothing. It tells a bad step from a bad core after a failure."""
        try:
            self._runtime.check(self._core)
            self._run(*self._idle)
        except (CoreLost, RuntimeError, ValueError):
            return False
        return True
