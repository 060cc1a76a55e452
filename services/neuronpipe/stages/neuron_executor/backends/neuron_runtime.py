"""The Neuron runtime of this process, which owns the cores for all models and loads their traces onto them."""

import functools
import itertools
import re
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.runtimes.neuron import (
    DOUBLE_SUFFIX,
    DOUBLES_VARIABLE,
    allows_doubles,
    sdk_release,
    sdk_words,
)

# NRT status codes after which a core never computes again: 101 EXEC_UNIT_UNRECOVERABLE, 6 HW_ERROR, 1200 to 1206
# hardware. Source: nrt_status.rst of aws-neuron/aws-neuron-sdk.
_FATAL = re.compile(r"status=(?:101|6|120\d)\b|UNRECOVERABLE|NRT_HW_ERROR")


class NeuronRuntime:
    """Loads traces onto cores, and records lost cores.

    The numbers of cores count from 0 among the cores of this process.
    """

    def __init__(self) -> None:
        self._sdk = import_module("torch_neuronx")
        self.version = str(self._sdk.__version__)
        # The context that places a model on a core belongs to the process, not to a thread.
        self._load_lock = threading.Lock()
        self._lost_lock = threading.Lock()
        self._lost: dict[int, str] = {}
        self._turns = itertools.count()

    def load(self, read: Callable[[], Any], core: int) -> Any:
        """Loads a trace onto one core with `read`, and returns it. Raises the SDK's errors."""
        with self._load_lock, self._placement("neuron_cores_context")(start_nc=core, nc_count=1):
            return read()

    def move(self, trace: Any, core: int) -> None:
        """Puts the states of a trace on its core, where they stay from one execution to the next."""
        with self._load_lock:
            self._sdk.move_trace_to_device(trace, core)

    def take_turn(self, cores: int) -> int:
        """Returns the core for the next model that takes a whole core."""
        return next(self._turns) % cores

    def _placement(self, name: str) -> Any:
        """Returns a placement function of the SDK. Before SDK 2.25 it is in `experimental`."""
        return getattr(self._sdk, name, None) or getattr(self._sdk.experimental, name)

    def check(self, core: int) -> None:
        """Raises CoreLost if the core is lost. Must be called before each execution of any model."""
        if core in self._lost:
            raise self._lost_before(core)

    def lose(self, core: int, error: BaseException) -> CoreLost:
        """Marks a core as lost for all models, and returns the error to raise.

        If the core was already lost, the batch was only prepared for it.
        """
        with self._lost_lock:
            if core in self._lost:
                return self._lost_before(core)
            self._lost[core] = sdk_words(str(error))
        return CoreLost(f"core {core} was lost: {self._lost[core]}")

    def _lost_before(self, core: int) -> CoreLost:
        return CoreLost(f"core {core} was lost: {self._lost[core]}", has_begun=False)

    def is_fatal(self, error: BaseException) -> bool:
        """Returns whether the text of an error means that the core is lost."""
        return bool(_FATAL.search(str(error)))


@functools.cache
def neuron_runtime() -> NeuronRuntime:
    """Returns the runtime of this process.

    The SDK's runtime starts once, reads its environment then, and ends with the process.
    """
    return NeuronRuntime()


_SDK_VERSION = "torch-neuronx"


def check_versions(name: str, versions: Mapping[str, str]) -> None:
    """Checks that the installed SDK runs a model's traces. `versions`: the compiler's versions. Raises SetupError."""
    compiled, installed = versions.get(_SDK_VERSION, ""), neuron_runtime().version
    if compiled.endswith(DOUBLE_SUFFIX) and not installed.endswith(DOUBLE_SUFFIX):
        raise SetupError(
            f"model {name!r}: made with the contract double of the tests, which no Neuron device can run; "
            "compile it with the SDK"
        )
    if compiled != installed:
        raise SetupError(
            f"model {name!r}: compiled with torch-neuronx {compiled or 'unknown'} (SDK "
            f"{sdk_release(compiled)}), here is {installed} "
            f"(SDK {sdk_release(installed)}); compile it again with this one, or install that one"
        )
    if installed.endswith(DOUBLE_SUFFIX):
        if not allows_doubles():
            raise SetupError(
                f"model {name!r}: {installed} is the contract double of the tests, which is no Neuron device; "
                "only tests set "
                f"{DOUBLES_VARIABLE}=1 to run on it"
            )
        log_warning(
            "this is the contract double of the tests: PyTorch computes, and its times say nothing of Neuron",
            model=name,
        )


def load_trace(path: Path, core: int, *, has_states: bool = False) -> Any:
    """Loads a trace on a core, with its states if it has states. Raises SetupError."""
    try:
        trace = neuron_runtime().load(lambda: torch.jit.load(str(path)), core)
        if has_states:
            neuron_runtime().move(trace, core)
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"{path}: cannot be loaded on core {core}: {_advice(error)}") from error
    return trace


# Advice for errors of the SDK: (part of the SDK's text, advice).
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
