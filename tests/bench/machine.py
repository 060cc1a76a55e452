"""The machine that a benchmark ran on, in words."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

from neuronpipe.runtimes.cpus import available_cpus
from tests.bench.peers.environments import ROOT

_INSTRUCTIONS = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX-VNNI": "avx_vnni",
    "bfloat16": "avx512_bf16",
}
_AMX = ("amx_tile", "amx_int8", "amx_bf16")
_LIBRARIES = ("grpcio", "protobuf", "uvloop", "numpy", "tokenizers", "openvino", "torch", "transformers")


def describe_machine() -> dict[str, str]:
    """What decides about its figures, by name."""
    cpu = _cpu_info()
    flags = set(cpu.get("flags", cpu.get("Features", "")).split())
    instructions = [f"{name} {'yes' if flag in flags else 'no'}" for name, flag in _INSTRUCTIONS.items()]
    instructions.append(f"AMX {'yes' if flags & set(_AMX) else 'no'}")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "CPU": cpu.get("model name", platform.processor() or platform.machine()),
        "CPU family, model, stepping": ", ".join(cpu.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "CPUs to use": str(available_cpus()),
        "virtual": "yes" if "hypervisor" in flags else "not said",
        "instructions": ", ".join(instructions),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load before": ", ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": ", ".join(f"{name} {version(name)}" for name in _LIBRARIES),
    }


def _cpu_info() -> dict[str, str]:
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return {}
    first = file.read_text().split("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "not known"
