"""AWS Neuron without its SDK: devices, releases, and the environment that its runtime reads once, at startup."""

import os
from collections.abc import Mapping
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.settings import MAX_CORES, parse_cores

# The folder of the driver's devices. A device with NeuronCore-v2 (inf2, trn1) has two cores.
DEVICE_FOLDER = Path("/dev")
CORES_PER_DEVICE = 2
# The suffix of a contract double's version, and the variable with which tests allow a double.
DOUBLE_SUFFIX = "+double"
DOUBLES_VARIABLE = "NEURONPIPE_TEST_DOUBLES"

# torch-neuronx 2.9.0.2.15.32035 is for PyTorch 2.9; its own version is 2.15, part of SDK 2.31.
# Source: src/helperscripts/n2-manifest.json of aws-neuron/aws-neuron-sdk, 2026-08.
_SDK_RELEASES = {"2.8": "2.24", "2.9": "2.25", "2.10": "2.26", "2.11": "2.27", "2.12": "2.28"}
_SDK_RELEASES |= {"2.13": "2.29", "2.15": "2.31"}
# In seconds. The documentation gives two defaults, 30 and 2.
_EXECUTION_TIMEOUT_S = 30
_TIMEOUT, _VISIBLE, _NUMBER = "NEURON_RT_EXEC_TIMEOUT", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"


def device_count() -> int:
    """Counts the Neuron devices of this machine or container."""
    return sum(path.name.removeprefix("neuron").isdigit() for path in DEVICE_FOLDER.glob("neuron*"))


def sdk_release(torch_neuronx_version: str) -> str:
    """Returns the SDK release that contains a version of torch-neuronx; "unknown" if it is not in the list."""
    parts = torch_neuronx_version.partition("+")[0].split(".")
    return _SDK_RELEASES.get(".".join(parts[3:5]), "unknown")


def sdk_words(text: str) -> str:
    """Returns the relevant line of an SDK error, without the traceback that TorchScript puts around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    relevant = [line for line in lines if "status=" in line] or [
        line for line in lines if "Error" in line and "interpreter" not in line
    ]
    return (relevant or lines or ["no text"])[-1]


def runtime_environment(cores: int | str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables that make Neuron's runtime take these cores. Set them before the SDK is imported.

    `cores`: a list, or a number (0: the cores that `environment` names, or all). Raises SetupError if `environment`
    names other cores: the parent process or the container may have been given those.
    """
    present, wanted = _cores_of(environment), parse_cores(cores) if isinstance(cores, str) else cores
    if present and wanted and not _agree(wanted, present[1]):
        raise SetupError(
            f"cores {cores}: contradicts {present[0]}={environment[present[0]]} in the environment; leave one "
            "of the two out"
        )
    added = {} if _TIMEOUT in environment else {_TIMEOUT: str(_EXECUTION_TIMEOUT_S)}
    if isinstance(cores, str):
        added[_VISIBLE] = cores
    elif cores and not present:
        added[_NUMBER] = str(cores)
    return added


def core_count(cores: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of cores; 0 means the cores that the runtime takes.

    Raises SetupError if all are requested and there are none.
    """
    if cores:
        return cores
    if present := _cores_of(environment):
        return _count(present[1])
    if not (devices := device_count()):
        raise SetupError(
            f"no Neuron device on this machine: {DEVICE_FOLDER} holds no neuron0; in a container, hand it over with "
            "--device=/dev/neuron0"
        )
    return devices * CORES_PER_DEVICE


def _agree(wanted: int | tuple[int, ...], present: int | tuple[int, ...]) -> bool:
    if isinstance(wanted, tuple) and isinstance(present, tuple):
        return wanted == present
    return _count(wanted) == _count(present)


def _count(cores: int | tuple[int, ...]) -> int:
    return len(cores) if isinstance(cores, tuple) else cores


def _cores_of(environment: Mapping[str, str]) -> tuple[str, int | tuple[int, ...]] | None:
    """Returns the variable that the runtime reads, and its cores or number of cores; None for all.

    Raises SetupError.
    """
    if text := environment.get(_VISIBLE):
        try:
            return _VISIBLE, parse_cores(text)
        except SetupError as error:
            raise SetupError(f"{_VISIBLE}: {error}") from error
    text = environment.get(_NUMBER, "0") or "0"
    if not text.isdecimal() or int(text) > MAX_CORES:
        raise SetupError(f"{_NUMBER}={text}: must be a number of cores, at most {MAX_CORES}")
    return (_NUMBER, int(text)) if int(text) else None


def allows_doubles() -> bool:
    """Returns whether a contract double may replace the SDK, which only tests allow (tests/doubles/README.md)."""
    return os.environ.get(DOUBLES_VARIABLE) == "1"
