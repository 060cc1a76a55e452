"""backends/cpus.py: how many CPUs a process has, whatever the machine has."""

import os
from pathlib import Path

import pytest

from neuronpipe.runtimes.cpus import available_cpus


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
