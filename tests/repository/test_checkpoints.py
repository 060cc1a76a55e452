"""The checkpoints in docs/models.md: each has a model of its configuration in a test, or in what was measured."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.documentation.checkpoints import CHECKPOINTS, EQUALS, table
from tests.documentation.measured_models import GRAPHS, PAGE, RECORD
from tests.models import decoders, encoder_decoders

_ROWS: list[dict[str, Any]] = json.loads(CHECKPOINTS.read_text())
_ROOT = Path(__file__).parents[2]
# Test → the families of its models, by the names in tests/models/.
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "test_a_decoder_is_compiled_with_every_token_compared": decoders.DECODERS,
    "test_every_token_is_compared": encoder_decoders.MODELS,
}
_FIELDS = {"id", "family", "task", "millions", "options", "equals", "case", "reason", "measured"}


def test_the_page_begins_with_the_table() -> None:
    page = PAGE.read_text()
    assert table(_ROWS) in page
    assert page.index(_ROWS[0]["id"]) < page.index("## Architectures")


def test_each_checkpoint_is_listed_once_with_known_fields() -> None:
    ids = [row["id"] for row in _ROWS]
    assert len(set(ids)) == len(ids) >= 50
    assert all(row.keys() <= _FIELDS for row in _ROWS)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", id) for id in ids)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: str(row["id"]))
def test_a_checkpoint_has_a_case_that_compiles_or_refuses_its_configuration(row: dict[str, Any]) -> None:
    if "case" not in row:
        graph = next(graph for graph, served in GRAPHS.items() if row["task"].replace("-", "_") in served)
        measured = [
            recorded
            for recorded in json.loads(RECORD.read_text())["rows"]
            if (recorded["architecture"], recorded["task"]) == (row["family"], graph)
        ]
        assert measured
        assert not any("reason" in recorded for recorded in measured)
        assert "reason" not in row
        return
    path, _, name = row["case"].partition("::")
    assert re.search(rf"^(async )?def {name}\(", (_ROOT / path).read_text(), re.MULTILINE)
    assert ("refused" in name) == ("reason" in row)
    assert name not in _FAMILIES or row["family"] in _FAMILIES[name]


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: str(row["id"]))
def test_a_checkpoint_names_the_reference_that_it_equals_or_why_it_is_refused(row: dict[str, Any]) -> None:
    assert ("reason" in row) or (row.get("equals") or row["task"] in EQUALS)
    assert "measured" not in row or set(row["measured"]) >= {"float32", "int8"}
