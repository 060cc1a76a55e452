"""The CPUs that this process may use."""

import math
import os
from pathlib import Path

from neuronpipe.core.errors import SetupError

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """The number of CPUs by affinity (taskset, cpusets), or by the container's CPU quota if that is less."""
    return max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _quota(cgroup)))


def cpu_threads(threads: int, cores: int) -> int:
    """The number of threads; 0 means one for each CPU.

    Raises SetupError for more threads than CPUs, or fewer than cores.
    """
    cpus = available_cpus()
    threads = threads or cpus
    if threads > cpus:
        raise SetupError(f"threads: {threads}, but this process may use {cpus} CPUs only")
    if cores > threads:
        raise SetupError(f"cores: {cores}, but there are {threads} threads only, and each core needs one")
    return threads


def _quota(cgroup: Path) -> int:
    """The CPU quota of control groups, version 2 or 1, rounded up; a very large number without one.

    https://docs.kernel.org/admin-guide/cgroup-v2.html: cpu.max is "$MAX $PERIOD" in microseconds, $MAX "max" for no limit.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.ceil(float(quota) / float(period)) if quota.strip() not in ("max", "-1") else 1 << 16
    except (OSError, ValueError):  # no control groups, or no limit
        return 1 << 16
