"""runtimes/host.py: the CPUs that a process may use."""

import os
import sys
import threading
from pathlib import Path

import pytest

from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus, compute_pool


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


# What cpu.max holds, and the CPUs that it leaves of eight.
QUOTAS = {"max 100000": 8, "200000 100000": 2, "150000 100000": 2, "50000 100000": 1, "1600000 100000": 8, "broken": 8}


@pytest.mark.parametrize("content", QUOTAS)
def test_a_containers_quota_is_rounded_up(tmp_path: Path, content: str) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert available_cpus(tmp_path) == QUOTAS[content]


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 8), ("300000", 3)])
def test_control_groups_of_version_1_are_read_too(tmp_path: Path, quota: str, cpus: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert available_cpus(tmp_path) == cpus


def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == 8


def _priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
def test_threads_that_compute_and_those_that_they_start_leave_the_cpus_to_the_event_loop() -> None:
    found: list[int] = []

    def compute() -> None:
        found.append(_priority())
        other = threading.Thread(target=lambda: found.append(_priority()))
        other.start()
        other.join()

    with compute_pool(1, "core") as pool:
        pool.submit(compute).result()
    assert found == [min(19, _priority() + 10)] * 2
