"""PyTorch's exported programs, loaded without transformers: on the first GPU, or on the CPU as the reference."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import (
    ENCODER,
    TOP_TOKENS,
    DecoderLost,
    TokenScores,
    block_count,
)


def load_program(path: Path, device: torch.device) -> Any:
    """Loads an exported program onto a device. Raises SetupError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the loader's own parts
            program = torch.export.load(path)
            if device.type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
        return program
    except Exception as error:  # another version of PyTorch may raise any error for the file
        raise SetupError(
            f"{path}: PyTorch {torch.__version__} cannot load it; compile the model again with this version"
        ) from error


def is_lost(error: Exception, device: torch.device) -> bool:
    """Returns whether a device never computes again: after a fault, the context of the process is unusable.

    A lack of memory is no such fault.
    """
    is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
    return device.type == "cuda" and not is_memory and "CUDA error" in str(error)


class TorchGraph:
    """See GatheringGraph. The cache is a tensor on the device."""

    def __init__(self, model_file: Path, threads: int, max_tokens: int, max_bytes: int) -> None:
        """See load_decoder. `threads`: CPU threads, which all models of the process share; 0: unchanged."""
        self._device = device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu" and threads:
            torch.set_num_threads(threads)
        program = load_program(model_file, device)
        described = next(node.meta["val"] for node in program.graph.nodes if node.name == "cache")
        parts, heads, size, width = (int(described.shape[axis]) for axis in (0, 2, 3, 4))
        block_bytes = parts * heads * size * width * described.dtype.itemsize
        blocks = block_count(model_file, block_bytes, max_tokens, max_bytes)
        self.cache: Any = torch.zeros((parts, blocks, heads, size, width), dtype=described.dtype, device=device)
        self._step = program.module()
        encoder_file = model_file.with_name(f"{ENCODER}.pt2")
        self._encoder = load_program(encoder_file, device).module() if encoder_file.exists() else None

    def step(self, inputs: dict[str, NDArray[np.int64]]) -> tuple[TokenScores, Any]:
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
        logits, new = self._run(self._step, **tensors, cache=self.cache)
        logits = logits.float()
        top_logits, top_ids = logits.topk(min(TOP_TOKENS, logits.shape[1]))
        log_sums = (logits - top_logits[:, :1]).exp().sum(1).log()
        return TokenScores(*(array.cpu().numpy() for array in (logits, top_ids.int(), top_logits, log_sums))), new

    def read(self, token_ids: NDArray[np.int64]) -> Any:
        if self._encoder is None:
            raise RuntimeError("the model has no encoder")
        return self._run(self._encoder, input_ids=torch.from_numpy(token_ids).to(self._device))

    def _run(self, program: Any, **inputs: torch.Tensor) -> Any:
        try:
            with torch.no_grad():
                return program(**inputs)
        except (RuntimeError, IndexError, AssertionError) as error:
            if is_lost(error, self._device):
                raise DecoderLost(f"{self._device} was lost") from error
            raise RuntimeError(f"PyTorch could not compute a step on {self._device}") from error
