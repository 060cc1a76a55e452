"""The files in a folder by which `accept` and its measuring process communicate, and the settings of `accept`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_settings import SettingsConfigDict

from neuronpipe.stages.settings import CoreSettings


class AcceptSettings(CoreSettings):
    """Settings of `neuronpipe accept`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ACCEPT_")


REQUEST_FILE, FOUND_FILE = "request.json", "found.json"


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The parameters of the measuring process.

    `batches` is the number of batches of the comparison, in the folder as in-0.npz and so on. Each of `shapes`, such as
    8x128, is measured for `seconds`.
    """

    bundle: str
    backend: str
    cores: int
    shapes: list[str]
    seconds: float
    batches: int


def output_file(core: int, number: int) -> str:
    """The file of a core's outputs for a batch."""
    return f"out-{core}-{number}.npz"


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by name."""
    np.savez(path, **arrays)


def read_arrays(path: Path) -> dict[str, Any]:
    """Reads arrays by name."""
    with np.load(path) as arrays:
        return dict(arrays)


def error_text(error: BaseException) -> str:
    """An error and its cause, for the report."""
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" <- {type(cause).__name__}: {cause}" if cause else "")
