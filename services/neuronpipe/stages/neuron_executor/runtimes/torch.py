"""PyTorch's exported programs, loaded without transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch

from neuronpipe.core.errors import SetupError


def load_program(path: Path, device: torch.device) -> Any:
    """An exported program on a device. Raises SetupError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the loader's own parts
            program = torch.export.load(path)
            if device.type != "cpu":
                from torch.export.passes import move_to_device_pass

                program = move_to_device_pass(program, device)
        return program
    except Exception as error:  # another version of PyTorch may raise anything for the file
        raise SetupError(
            f"{path}: PyTorch {torch.__version__} cannot load it; compile the model again with this version"
        ) from error


def is_lost(error: Exception, device: torch.device) -> bool:
    """Whether a device computes no more: after a fault on it, the context of the process is unusable.

    After a lack of memory, it is not.
    """
    is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
    return device.type == "cuda" and not is_memory and "CUDA error" in str(error)
