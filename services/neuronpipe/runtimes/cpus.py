"""The CPUs that this process may use."""

import math
import os
from pathlib import Path

from neuronpipe.core.errors import SetupError

_CGROUP = Path("/sys/fs/cgroup")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Those that it may run on (taskset, cpusets), or fewer where a container's quota gives it less time than they have."""
    return max(1, min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _quota(cgroup)))


def cpu_threads(threads: int, cores: int) -> int:
    """How many threads that is, 0 for one a CPU. Raises SetupError for more than there are CPUs, or fewer than one a core."""
    cpus = available_cpus()
    threads = threads or cpus
    if threads > cpus:
        raise SetupError(f"threads: {threads}, but this process may use {cpus} CPUs only")
    if cores > threads:
        raise SetupError(f"cores: {cores}, but there are {threads} threads only, and each core needs one")
    return threads


def _quota(cgroup: Path) -> int:
    """CPUs by the quota of control groups, of version 2 or 1, rounded up; very many without one.

    https://docs.kernel.org/admin-guide/cgroup-v2.html: cpu.max is "$MAX $PERIOD" in microseconds, $MAX "max" for no limit.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.ceil(float(quota) / float(period)) if quota.strip() not in ("max", "-1") else 1 << 16
    except (OSError, ValueError):  # no control groups here, or none that limit
        return 1 << 16
