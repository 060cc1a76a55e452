"""Figures that others have published, for comparing: on other machines, never measured here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Published:
    """A table as it was published."""

    title: str
    source: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def published_tables() -> Mapping[str, Published]:
    """By name."""
    return {name: Published(**one) for name, one in json.loads(_FILE.read_text()).items()}
