"""results.py and report.py: what a run leaves, and what cannot be read."""

import json
import re
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.costs import DEFAULT_PRICES, Costs, Goal, Instance, cost_per_million, read_prices
from neuronpipe.measure.benchmark.matrix import THROUGHPUT
from neuronpipe.measure.benchmark.report import write_report
from neuronpipe.measure.benchmark.results import CellResult, read_results, results_csv, write_results
from neuronpipe.measure.benchmark.tables import figure_tables
from tests.unit.measure.benchmark.written_runs import cell, result, run

_COSTS = Costs(read_prices(), [Instance("c7a.large", 2, {"on-demand": 0.36, "spot": None})])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = run([result(cell(), 20.0), CellResult(cell=cell(64), reason="too much")])
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
        ('{"schema_version": 1, "cells": []}', "is damaged"),
    ],
)
def test_reports_that_cannot_be_read_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(SetupError, match=message):
        read_results(tmp_path)


def test_throughput_is_that_of_callers_who_wait() -> None:
    # Two callers with batches of 8 that take 100 ms: 160 a second.
    measured = result(cell(8, cores=2, mode=THROUGHPUT), 100.0, spread=0.0)
    assert measured.throughput_per_s == pytest.approx(160)
    assert measured.tokens_per_s == pytest.approx(160 * 128)
    assert (
        results_csv(run([measured]))
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


def test_every_table_has_the_columns_of_published_figures() -> None:
    tables = list(figure_tables(run([result(cell(), 20.0), result(cell(8), 100.0)]), _COSTS))
    columns = [tuple(table.columns) for table in tables]
    assert [names[0] for names in columns] == ["Instance", "Model", "Model", "Model", "Model"]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    grouping, _, _, best, single = tables
    # 20 ms a text are 50 a second: at $0.36 an hour, a million cost $2.
    assert grouping.rows[0][-1] == "$2.00"
    assert best.rows[0][:2] == ("bert-base-uncased, openvino float32, 1 core", "8")
    assert len(single.rows) == 1


def test_a_page_names_what_is_wrong(tmp_path: Path) -> None:
    measured = [result(cell(1, length), length / 4) for length in (8, 128)]
    found = run([*measured, CellResult(cell=cell(64), reason="no | or yes")])
    write_results(found, tmp_path)
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
