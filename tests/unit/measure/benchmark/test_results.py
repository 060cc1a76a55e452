"""results.py and report.py: what a run leaves, and what cannot be read."""

import json
import re
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.costs import DEFAULT_PRICES, Costs, Goal, Instance, cost_per_million, read_prices
from neuronpipe.measure.benchmark.matrix import THROUGHPUT
from neuronpipe.measure.benchmark.report import write_report
from neuronpipe.measure.benchmark.results import CellResult, ColdStart, read_results, results_csv, write_results
from neuronpipe.measure.benchmark.tables import comparison_tables, published_tables
from tests.unit.measure.benchmark.written_runs import cell, result, run

_COSTS = Costs(read_prices(), [Instance("c7a.large", 2, {"on-demand": 0.36, "spot": None})])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = run(
        [result(cell(), 20.0), CellResult(cell=cell(64), reason="too much")], [ColdStart(model="m", task="t", length=8)]
    )
    write_results(written, tmp_path)
    read = read_results(tmp_path)
    assert read.cells[1] == written.cells[1]
    assert read.cells[0].latency_ms == pytest.approx(written.cells[0].latency_ms)
    assert read.machine == written.machine
    assert len(read.measured) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 2}', "has the schema version 2, this neuronpipe reads 1"),
        ("[]", "has the schema version None"),
        ("no", "is no JSON"),
        ('{"schema_version": 1, "cells": [], "cold_starts": []}', "is damaged"),
    ],
)
def test_reports_that_cannot_be_read_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(SetupError, match=message):
        read_results(tmp_path)


def test_throughput_is_that_of_callers_who_wait() -> None:
    # Two callers with batches of 8 that take 100 ms: 160 a second.
    one = result(cell(8, cores=2, mode=THROUGHPUT), 100.0, spread=0.0)
    assert one.throughput_per_s == pytest.approx(160)
    assert one.tokens_per_s == pytest.approx(160 * 128)
    assert (
        results_csv(run([one]))
        .splitlines()[1]
        .startswith("bert-base-uncased,openvino,float32,2,throughput,8,128,100,100,100,100")
    )


def test_cost_is_price_over_throughput_and_a_missing_price_is_said(tmp_path: Path) -> None:
    # $0.36 an hour are $0.0001 a second; 100 a second, so a million cost $1.
    assert cost_per_million(0.36, 100.0) == pytest.approx(1.0)
    assert cost_per_million(None, 100.0) is None
    prices = json.loads(DEFAULT_PRICES.read_text())
    prices["instances"]["c7a.large"]["on_demand_per_hour"] = -1
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    with pytest.raises(SetupError, match=r"c7a.large: the on-demand price is -1"):
        read_prices(tmp_path / "prices.json")
    prices["instances"] = {}
    del prices["date"]
    (tmp_path / "prices.json").write_text(json.dumps(prices))
    with pytest.raises(SetupError, match="lacks 'date'"):
        read_prices(tmp_path / "prices.json")


def test_every_published_table_has_its_counterpart_in_the_same_columns() -> None:
    cold = ColdStart(
        model="bert-base-uncased", task="text_classification", length=128, size_bytes=438_000_000,
        memory_bytes=900 << 20, starts_ms=[2000.0], model_ms=[50.0, 60.0], overhead_ms=[1.0, 2.0],
    )  # fmt: skip
    tables = list(comparison_tables(run([result(cell(), 20.0), result(cell(8), 100.0)], [cold]), _COSTS))
    published = published_tables()
    ours, theirs = tables[::2], tables[1::2]
    assert [table.columns for table in theirs] == [one["columns"] for one in published.values()]
    assert all(table.title.startswith("Published: ") and "not measured here" in table.note for table in theirs)
    by_name = dict(zip(published, ours, strict=True))
    for name in ("core_grouping", "best_throughput", "single_latency"):
        assert by_name[name].columns == published[name]["columns"]
        assert by_name[name].rows
    assert list(by_name["serverless"].columns[:6]) == published["serverless"]["columns"]
    # 900 MiB fit in 1024 MB: 56.5 ms x $0.00002 x 1e6 = $1.13, and $40.00 with a start of 2 s.
    assert by_name["serverless"].rows[0][-2:] == ("$1.13", "$40.00")
    assert len(by_name["two_machines"].columns) == len(published["two_machines"]["columns"])


def test_a_page_names_what_is_wrong(tmp_path: Path) -> None:
    write_results(
        found := run(
            [
                *(result(cell(1, length), length / 4) for length in (8, 128)),
                CellResult(cell=cell(64), reason="no | or yes"),
            ]
        ),
        tmp_path,
    )
    found.planned = 9
    markdown = write_report(found, _COSTS, tmp_path, Goal(40.0, 100.0)).read_text()
    assert "not complete: 3 of 9" in markdown
    assert "| no \\| or yes |" in markdown
    assert "price missing" in markdown
    assert "0.0% by the hypervisor (steal), 0.0% by other processes" in markdown
    # 31 a second at 70 %: five replicas for 100, at $0.36 an hour each.
    assert "| bert-base-uncased | c7a.large | 5 | 1 | 128 | float32 | 1 | 32" in markdown
    assert re.findall(r"\]\((.*?\.svg)\)", markdown) == ["latency-by-length.svg", "parts.svg"]
    for plot in ("latency-by-length.svg", "parts.svg"):
        svg = (tmp_path / plot).read_text()
        assert svg.startswith("<svg")
        assert "prefers-color-scheme" in svg
