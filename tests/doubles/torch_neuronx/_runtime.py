"""The simulated runtime: cores that one process owns, their memory, their faults, and what is loaded on them."""

import fcntl
import getpass
import itertools
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_CORES_PER_DEVICE = 2
_NO_DEVICE = (
    "Bad StatusOr access: INVALID_ARGUMENT: PJRT_Client_Create: error condition nullptr != (args)->client->Error(): "
    "Init: error condition "
    "!(num_devices > 0)"
)
# After these a core fails until the process ends.
_FATAL = re.compile("101|12\\d\\d")

_real_load = torch.jit.load
_started: "Runtime | None" = None
_start_lock = threading.Lock()
_executions = itertools.count(1)


def settings() -> dict[str, str]:
    """Returns the runtime's variables of the environment."""
    return {name: value for name, value in os.environ.items() if name.startswith("NEURON_RT_")}


# Stricter than the SDK, which reads them with its first load: set between import and load they have an effect, or none,
# by luck.
_imported_with = settings()


def devices() -> int:
    """Returns the number of devices of this machine."""
    return int(os.environ.get("NEURON_DOUBLE_DEVICES", "0"))


def folder() -> Path:
    """Returns the folder in which processes agree on the owner of a core, and in which tests put faults."""
    path = Path(
        os.environ.get("NEURON_DOUBLE_FOLDER") or Path(tempfile.gettempdir()) / f"neuron-double-{getpass.getuser()}"
    )
    path.mkdir(parents=True, exist_ok=True)
    return path


def fault(name: str) -> str | None:
    """Returns the fault that a test wants, as the content of a file."""
    path = folder() / f"fault-{name}"
    return path.read_text().strip() if path.exists() else None


def log(event: str) -> None:
    """Tells a test what happened."""
    if path := os.environ.get("NEURON_DOUBLE_LOG"):
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()} {event}\n")


def _count_execution() -> None:
    if next(_executions) == int(os.environ.get("NEURON_DOUBLE_KILL_AFTER", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


class Core:
    """A core computes one thing at a time."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.loaded_bytes = 0
        self.waiting = 0
        self.most_waiting = 0
        self._lock = threading.Lock()
        self._status: str | None = None
        self._time_s = float(os.environ.get("NEURON_DOUBLE_EXECUTION_MS", "0")) / 1000

    def execute(self, program: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Raises RuntimeError with the status of a fault."""
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            with self._lock:
                log(f"execute core={self.index} shape={'x'.join(map(str, inputs[0].shape))}")
                _count_execution()
                if self._time_s:
                    time.sleep(self._time_s)
                self._fail()
                try:
                    with torch.inference_mode():
                        outputs = program(*inputs)
                except (IndexError, RuntimeError) as error:
                    if "index out of range" in str(error):
                        raise RuntimeError("nrt_execute failed: status=1006 message=NRT_EXEC_OOB") from None
                    raise
        finally:
            self.waiting -= 1
        return [array.detach().clone() for array in tensors_of(outputs)]

    def _fail(self) -> None:
        status = self._status or fault(f"core-{self.index}")
        if status is None:
            return
        if _FATAL.fullmatch(status):
            self._status = status
        raise RuntimeError(f"nrt_execute failed: status={status} message=NRT_INJECTED")


class Runtime:
    """One for a process; reads the environment once. Its cores are this process's until it ends."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._held: list[int] = []
        total = devices() * _CORES_PER_DEVICE
        if not total:
            raise RuntimeError(_NO_DEVICE)
        if late := sorted(name for name, _ in settings().items() ^ _imported_with.items()):
            raise RuntimeError(
                f"(of the double) {', '.join(dict.fromkeys(late))}: set after torch_neuronx was imported, "
                "which is too late"
            )
        visible = os.environ.get("NEURON_RT_VISIBLE_CORES")
        if visible is not None:
            wanted = _parse_cores(visible)
            if not all(0 <= index < total for index in wanted) or not all(self._own(index) for index in wanted):
                self._release()
                raise _not_available(f"nc{wanted[0]}-nc{wanted[-1]}")
        else:
            count = int(os.environ.get("NEURON_RT_NUM_CORES", "0")) or total
            wanted = self._own_contiguous(count, total)
        self.cores = [Core(index) for index in wanted]
        self.core_bytes = int(os.environ.get("NEURON_DOUBLE_CORE_BYTES", 16 << 30))
        self._turn = 0

    def check_fork(self) -> None:
        """Raises RuntimeError in a process that was forked from the process that started the runtime."""
        if os.getpid() != self._pid:
            raise RuntimeError("the Neuron runtime is not fork-safe: it was started by another process")

    def place(self, start: int, count: int) -> list[Core]:
        """Returns the cores for a model; with a start of -1, the least-used cores."""
        if count == 0 or count < -1 or count > len(self.cores):
            raise ValueError(f"nc_count {count}: there are {len(self.cores)} cores")
        count = max(1, count)
        if start < -1 or start + count > len(self.cores):
            raise ValueError(f"start_nc {start}: there are {len(self.cores)} cores")
        if start == -1:
            start = min(
                range(len(self.cores) - count + 1),
                key=lambda index: (self.cores[index].loaded_bytes, (index - self._turn) % 64),
            )
            self._turn = start + 1
        return self.cores[start : start + count]

    def _own(self, index: int) -> bool:
        descriptor = os.open(folder() / f"core-{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._held.append(descriptor)
        return True

    def _own_contiguous(self, count: int, total: int) -> list[int]:
        for first in range(total - count + 1):
            wanted = list(range(first, first + count))
            if all(self._own(index) for index in wanted):
                return wanted
            self._release()
        raise _not_available(str(count))

    def _release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()


def runtime() -> Runtime:
    """Returns the runtime of this process, and starts it first if necessary. Raises RuntimeError."""
    global _started
    with _start_lock:
        if _started is None:
            _started = Runtime()
        _started.check_fork()
        return _started


def restart_process() -> None:
    """Does to the cores as the end of a process and the start of another process do. For tests in one process only."""
    global _started, _imported_with
    with _start_lock:
        if _started is not None:
            _started._release()
        _started = None
        _imported_with = settings()


def _parse_cores(text: str) -> list[int]:
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _not_available(requested: str) -> RuntimeError:
    return RuntimeError(
        f"NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:{requested} Available:0"
    )


def patch_load() -> None:
    """Makes torch.jit.load put compiled models on cores from now on."""
    from torch_neuronx._model import placed

    def load(f: Any, map_location: Any = None, _extra_files: Any = None, _restore_shapes: bool = False) -> Any:
        module = _real_load(f, map_location, _extra_files, _restore_shapes)
        if not hasattr(module, "neuron_stamp"):
            return module
        if map_location is not None:
            raise RuntimeError("a compiled model has no map_location")
        return placed(module)

    torch.jit.load = load


def tensors_of(outputs: Any) -> Iterable[torch.Tensor]:
    """Returns the outputs of a program, which are a tensor, several tensors, or tensors by name."""
    if isinstance(outputs, dict):
        return outputs.values()
    return [outputs] if isinstance(outputs, torch.Tensor) else outputs
