"""The wings in docs/architecture.md are those of the code: their names, and the picture of their imports."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import grimp
import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "services" / "neuronpipe"
_MOST_WINGS = 16
# Wing → the wings that it imports.
Arrows: TypeAlias = Mapping[str, set[str]]


def _section() -> str:
    page = (_ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.partition("## Wings of the code")[2].partition("\n## ")[0]


def _drawn() -> Arrows:
    """The arrows of the picture. `a --> b & c` are two."""
    picture = _section().partition("```mermaid\n")[2].partition("```")[0]
    arrows: dict[str, set[str]] = defaultdict(set)
    for line in picture.splitlines()[1:]:
        tail, heads = line.split(" --> ")
        arrows[tail.strip()] |= {head.strip() for head in heads.split("&")}
    return arrows


def _beyond(wing: str, arrows: Arrows) -> set[str]:
    """The wings to which arrows lead from one, directly or through others."""
    found: set[str] = set()
    border = set(arrows.get(wing, ()))
    while border:
        found |= border
        border = {beyond for importer in border for beyond in arrows.get(importer, ())} - found
    return found


@pytest.fixture(scope="module")
def imported() -> Arrows:
    """The imports between wings, those for types only included."""
    graph = grimp.build_graph("neuronpipe", cache_dir=None)
    arrows: dict[str, set[str]] = defaultdict(set)
    for importer in graph.modules:
        for found in graph.find_modules_directly_imported_by(importer):
            wings = importer.split(".")[1:2] + found.split(".")[1:2]
            if len(wings) == 2 and len(set(wings)) == 2 and wings[0] in _wings():
                arrows[wings[0]].add(wings[1])
    return arrows


def _wings() -> set[str]:
    """The names at the top of the package."""
    names = {path.stem for path in _PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    return names - {"__init__", "__main__", "__pycache__"}


def test_there_are_at_most_sixteen_wings() -> None:
    assert len(_wings()) <= _MOST_WINGS


def test_the_picture_and_the_table_name_every_wing() -> None:
    drawn = set(_drawn()).union(*_drawn().values())
    assert drawn == _wings()
    assert set(re.findall(r"^\| `(\w+)` \|", _section(), re.MULTILINE)) == _wings()


def test_the_arrows_lead_from_each_wing_to_all_that_it_imports(imported: Arrows) -> None:
    drawn = _drawn()
    assert {wing: found - _beyond(wing, drawn) for wing, found in imported.items()} == {
        wing: set() for wing in imported
    }


def test_each_arrow_is_an_import_and_says_what_no_others_say(imported: Arrows) -> None:
    drawn = _drawn()
    for wing, heads in drawn.items():
        assert heads <= imported[wing]
        through_others = {beyond for head in heads for beyond in _beyond(head, drawn)}
        assert heads & through_others == set()


def test_no_arrow_leads_back() -> None:
    drawn = _drawn()
    assert [wing for wing in drawn if wing in _beyond(wing, drawn)] == []
