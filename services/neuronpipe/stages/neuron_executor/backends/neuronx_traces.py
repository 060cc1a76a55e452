"""Loads traces for AWS Neuron onto cores, where the SDK that made them is installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.stages.neuron_executor.runtimes.neuron import (
    DOUBLE_SUFFIX,
    DOUBLES_VARIABLE,
    allows_doubles,
    sdk_release,
    sdk_words,
)

_SDK_VERSION = "torch-neuronx"


def check_versions(name: str, versions: Mapping[str, str]) -> None:
    """Whether the installed SDK runs a model's traces; `versions`: of what made them. Raises SetupError."""
    compiled, here = versions.get(_SDK_VERSION, ""), neuron_runtime().version
    if compiled.endswith(DOUBLE_SUFFIX) and not here.endswith(DOUBLE_SUFFIX):
        raise SetupError(
            f"model {name!r}: made with the contract double of the tests, which no Neuron device can run; "
            "compile it with the SDK"
        )
    if compiled != here:
        raise SetupError(
            f"model {name!r}: compiled with torch-neuronx {compiled or 'unknown'} (SDK "
            f"{sdk_release(compiled)}), here is {here} "
            f"(SDK {sdk_release(here)}); compile it again with this one, or install that one"
        )
    if here.endswith(DOUBLE_SUFFIX):
        if not allows_doubles():
            raise SetupError(
                f"model {name!r}: {here} is the contract double of the tests, which is no Neuron device; "
                "only tests set "
                f"{DOUBLES_VARIABLE}=1 to run on it"
            )
        log_warning(
            "this is the contract double of the tests: PyTorch computes, and its times say nothing of Neuron",
            model=name,
        )


def load_trace(path: Path, core: int, *, has_states: bool = False) -> Any:
    """A trace on a core, with its states if it has some. Raises SetupError."""
    try:
        trace = neuron_runtime().load(lambda: torch.jit.load(str(path)), core)
        if has_states:
            neuron_runtime().move(trace, core)
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"{path}: cannot be loaded on core {core}: {_advice(error)}") from error
    return trace


# Advice for errors of the SDK: (part of the SDK's text, what to do).
_ADVICE = (
    (
        "num_devices > 0",
        "this machine shows no Neuron device; see `neuron-ls`, and --device=/dev/neuron0 for a container",
    ),
    ("not available", "its cores belong to another process; end that one, or give each its own with --cores 0-1"),
    ("status=2", "it was compiled with a newer SDK; compile it again with this one"),
    (
        "status=10",
        "it was compiled with a newer SDK; compile it again with this one, or update the driver and the runtime",
    ),
    ("status=4", "the core's memory is full; compile fewer buckets, or serve fewer models"),
    ("nc_count", "there are fewer cores for this process; see --cores"),
    ("start_nc", "there are fewer cores for this process; see --cores"),
    ("Unknown", "the SDK that it was compiled with is not the one that is installed"),
)


def _advice(error: Exception) -> str:
    advice = next((advice for part, advice in _ADVICE if part in str(error)), "see troubleshooting in docs/neuron.md")
    return f"{advice} (the SDK says: {sdk_words(str(error))})"
