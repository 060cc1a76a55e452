"""The CPUs and the memory that this process may use."""

import math
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from neuronpipe.core.errors import SetupError

ResultT = TypeVar("ResultT")

_CGROUP = Path("/sys/fs/cgroup")
# Steps of `nice`. A thread of lower priority gets nine times less CPU time than a normal thread if both are busy.
_LOWER_PRIORITY, _LOWEST_PRIORITY = 10, 19


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Counts the CPUs by affinity (taskset, cpusets), or by the container's CPU quota if that is less."""
    return max(
        1,
        min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _quota(cgroup)),
    )


def cpu_threads(threads: int, cores: int) -> int:
    """Returns the number of threads; 0 means one thread for each CPU.

    Raises SetupError if there are more threads than CPUs, or fewer than cores.
    """
    cpus = available_cpus()
    threads = threads or cpus
    if threads > cpus:
        raise SetupError(f"threads: {threads}, but this process may use {cpus} CPUs only")
    if cores > threads:
        raise SetupError(f"cores: {cores}, but there are {threads} threads only, and each core needs one")
    return threads


def compute_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Makes threads that compute at a lower priority than the event loop. Their child threads inherit the priority.

    Otherwise the event loop waits for its share of busy CPUs: with int8 on two CPUs, 32 callers got 8 % fewer answers
    (2026-11-22, docs/benchmarks/README.md), and under overload calls grew old before the event loop accepted them.
    """
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name, initializer=_lower_priority)


class ComputeThread:
    """One thread of lower priority, for which the process does not wait at its end, because the work may hang."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, function: Callable[[], ResultT]) -> "Future[ResultT]":
        """Calls a function in the thread, after the functions before it."""
        future: Future[ResultT] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """Ends the thread after the functions that it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        _lower_priority()
        while job := self._jobs.get():
            job()


def _lower_priority() -> None:
    if sys.platform == "linux":  # other systems have priorities for processes only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _LOWER_PRIORITY)


def give_way(thread_id: int) -> None:
    """Gives a thread of this process the lowest priority. The thread may have ended."""
    if sys.platform == "linux" and thread_id:
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread_id, _LOWEST_PRIORITY)


def _quota(cgroup: Path) -> int:
    """Reads the CPU quota of control groups, version 2 or 1, rounded up; a very large number without a quota.

    https://docs.kernel.org/admin-guide/cgroup-v2.html: cpu.max is "$MAX $PERIOD" in microseconds; $MAX is "max" for no
    limit.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return math.ceil(float(quota) / float(period)) if quota.strip() not in ("max", "-1") else 1 << 16
    except (OSError, ValueError):  # no control groups, or no limit
        return 1 << 16


# Version 1 writes a number of pages instead of "no limit".
_NO_LIMIT = 1 << 60


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """Reads the container's memory limit in bytes from control groups, version 2 or 1; None without a limit."""
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):
        try:
            limit = file.read_text().strip()
        except OSError:
            continue
        return int(limit) if limit.isdigit() and int(limit) < _NO_LIMIT else None
    return None


def resident_bytes() -> int:
    """Returns the bytes of this process that no file backs; 0 if the system does not report them."""
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:  # not Linux
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")
