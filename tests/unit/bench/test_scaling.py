"""The model of capacity on more CPUs: what arithmetic says of costs that are made up here."""

from pathlib import Path

import pytest

from tests.bench.measurements import Measurement
from tests.bench.report import Run, write_report
from tests.bench.scaling import FRONT, SECTION, Capacity, Costs, capacity

# 1 ms of a loop and 3 ms of threads: 250/s on a CPU, and 1,000/s at most.
_ALL = Costs({"serve all": 1000.0}, 3000.0)
# The executor's loop bears 2,000/s; each front 1,000/s. 5 ms in all.
_FRONTS = Costs({"executor": 500.0, FRONT: 1000.0}, 3500.0)


@pytest.mark.parametrize(
    ("costs", "cpus", "shared_us", "expected"),
    [
        (_ALL, 1, 0.0, Capacity(250, "CPUs")),
        (_ALL, 2, 1000.0, Capacity(400, "CPUs")),
        (_ALL, 64, 0.0, Capacity(1000, "serve all")),
        # 4 / 5 ms: one front bears it.
        (_FRONTS, 4, 0.0, Capacity(800, "CPUs", 1)),
        (_FRONTS, 8, 0.0, Capacity(1600, "CPUs", 2)),
        (_FRONTS, 64, 0.0, Capacity(2000, "executor", 2)),
        # Fronts cost more than the CPUs bear beside the rest.
        (Costs({"executor": 1.0, FRONT: 1000.0}, 0.0), 2, 0.0, Capacity(2e6 / 1001, "CPUs", 2)),
    ],
)
def test_the_capacity_is_that_of_the_resource_that_is_busy_first(
    costs: Costs, cpus: int, shared_us: float, expected: Capacity
) -> None:
    found = capacity(costs, cpus, shared_us)
    assert found.per_s == pytest.approx(expected.per_s)
    assert (found.limit, found.fronts) == (expected.limit, expected.fronts)


def test_the_page_has_the_check_and_the_capacity_on_more_cpus(tmp_path: Path) -> None:
    run = Run("python -m tests.bench", {"instructions": "AVX2 yes"}, rounds=1, seconds=1.0)
    figures = {"loop_us: serve all": 1000.0, "threads_us": 3000.0, "generator_cpu_us": 1000.0}
    run.measurements = [
        Measurement(
            section=SECTION, system=system, callers=32, round=0, throughput_per_s=rate_per_s, figures=dict(figures)
        )
        for system, rate_per_s in (("serve all, 1 CPU", 200.0), ("serve all, 2 CPUs", 360.0))
    ]
    page = write_report(run, tmp_path)
    assert "| serve all | 1 | serve all 1000 | 3000 | 250 | CPUs | 200 | 0.80 |" in page
    assert "| serve all | 2 | serve all 1000 | 3000 | 400 | CPUs | 360 | 0.90 |" in page
    assert "| serve all | 1000 (CPUs) | 1000 (loop of serve all) | 1000 (loop of serve all) |" in page
