"""The machine that a benchmark ran on, in words."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from neuronpipe import __version__
from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

_INSTRUCTIONS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "bfloat16": "avx512_bf16",
}
_AMX = ("amx_tile", "amx_int8", "amx_bf16")
_LIBRARIES = ("grpcio", "protobuf", "uvloop", "numpy", "tokenizers", "openvino", "torch", "transformers")
# The root of a checkout; beside an installed package there is no repository.
_ROOT = Path(__file__).parents[3]
_INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")


def describe_machine() -> dict[str, str]:
    """Returns the facts that determine the machine's figures, by name."""
    cpu = _cpu_info()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    instructions = [f"{name} {'yes' if flag in flags else 'no'}" for name, flag in _INSTRUCTIONS.items()]
    instructions.append(f"AMX {'yes' if flags & set(_AMX) else 'no'}")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "neuronpipe": __version__,
        "commit": _commit(),
        "instance": instance_type() or "not known",
        "CPU": cpu.get("model name", platform.processor() or platform.machine()),
        "CPU family, model, stepping": ", ".join(cpu.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "CPUs to use": str(available_cpus()),
        "virtual": "yes" if "hypervisor" in flags else "not said",
        "instructions": ", ".join(instructions),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": package_versions(*_LIBRARIES),
    }


def instance_type() -> str:
    """Returns the type of the cloud's instance, by its firmware; empty if the firmware does not say it."""
    try:
        return _INSTANCE.read_text().strip()
    except OSError:
        return ""


class CpuWatch:
    """Measures the CPUs' time that other machines and other processes have taken since the watch was made."""

    def __init__(self) -> None:
        self._began = _cpu_seconds()

    def shares(self) -> tuple[float, float]:
        """Returns the CPUs' time, 0 to 1, that the hypervisor gave other machines, and that other processes took."""
        total, busy, steal, own_cpu = (now - before for now, before in zip(_cpu_seconds(), self._began, strict=True))
        if total <= 0:
            return 0.0, 0.0
        return max(0.0, steal / total), min(1.0, max(0.0, (busy - own_cpu) / total))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Returns the CPU time that processes, and processes that they started, have taken so far."""
    taken_s = 0.0
    for parent in map(psutil.Process, pids):
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                taken_s += times.user + times.system
    return taken_s


def resident_mb(pid: int) -> float:
    """Returns the resident memory of a process."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def _cpu_seconds() -> tuple[float, float, float, float]:
    """Returns seconds of all CPUs since the start: all, busy, stolen; and of this process with its children."""
    times = psutil.cpu_times()._asdict()
    steal = times.get("steal", 0.0)
    counted = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    total = sum(times.get(name, 0.0) for name in counted)
    busy = total - times["idle"] - times.get("iowait", 0.0) - steal
    ended = psutil.Process().cpu_times()
    return total, busy, steal, cpu_seconds([os.getpid()]) + ended.children_user + ended.children_system


def _cpu_info() -> dict[str, str]:
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    first = file.read_text().split("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def package_versions(*packages: str) -> str:
    """Returns the versions of packages, in words."""
    return ", ".join(f"{name} {_version(name)}" for name in packages)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(  # noqa: S603 (constants)
            command, cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "not known"
