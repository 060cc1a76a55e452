"""Keeps count of how our results compare with a reference's, and writes it down.

A test calls `compare` for every case and `check` at its end; a run ends with a table of all comparisons, which are
written to .cache/oracle/NAME.json too. Records travel as properties of the tests' reports, from whichever process ran
the test.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[2] / ".cache" / "oracle"

# The sums of a model's layers run in another order in OpenVINO than in PyTorch: scores of up to 1 differ by up to 1e-5
# (the bundles' manifests say by how much exactly); 5e-5 leaves room for other CPUs.
TOLERANCE = 5e-5

# The name of a record among a report's properties.
PROPERTY = "comparison"

_SHOWN = 5


@dataclass
class Comparison:
    """One task, or one part of it, against its reference. `name` is the table's row and the record's file, `scope` says
    which cases.
    """

    name: str
    reference: str
    scope: str = ""
    cases: int = 0
    largest_difference: float = 0.0
    mismatches: list[str] = field(default_factory=list)

    def compare(self, case: object, ours: Any, expected: Any, *, tolerance: float = TOLERANCE) -> None:
        """Counts a case. `ours` and `expected` are values as JSON has them: numbers with a fraction agree within the
        tolerance, whatever their type says; everything else must be equal.
        """
        self.cases += 1
        difference, problem = _difference(ours, expected, tolerance)
        self.largest_difference = max(self.largest_difference, difference)
        if problem:
            self.mismatches.append(f"{case!r}: {problem}")

    def compare_ranked(
        self,
        case: object,
        ours: Sequence[Mapping[str, Any]],
        expected: Sequence[Mapping[str, Any]],
        *,
        tolerance: float = TOLERANCE,
    ) -> None:
        """Counts a case of results that are sorted by their `score`. Two correct implementations, which round
        differently, may swap results of nearly the same score, also the last with the first that is left out.
        """
        self.compare(case, _in_order(ours, expected, tolerance), list(expected), tolerance=tolerance)

    def check(self, *, at_least: int) -> None:
        """Raises AssertionError where cases differ, or where fewer were compared than a suite is meant to."""
        assert not self.mismatches, "\n".join(
            [f"{len(self.mismatches)} of {self.cases} cases differ:", *self.mismatches[:_SHOWN]]
        )
        assert self.cases >= at_least, f"{self.cases} cases compared, expected {at_least}"

    def record(self) -> dict[str, Any]:
        """What is kept of it, as JSON has it."""
        return {
            "name": self.name,
            "reference": self.reference,
            "scope": self.scope,
            "cases": self.cases,
            "largest_difference": self.largest_difference,
            "mismatches": self.mismatches,
        }


HEADER = f"{'COMPARISON':34} {'CASES':>6} {'DIFFERENCE':>12} {'MISMATCHES':>11}  REFERENCE"


def write(record: Mapping[str, Any]) -> None:
    """Writes the record of a comparison."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{record['name']}.json").write_text(
        json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )


def row(record: Mapping[str, Any]) -> str:
    """The record's row of the table."""
    numbers = f"{record['cases']:6} {record['largest_difference']:12.2e} {len(record['mismatches']):11}"
    return f"{record['name']:34} {numbers}  {record['reference']}"


def scored(labels: Iterable[Any]) -> list[dict[str, Any]]:
    """Labels with their scores, as the pipelines of transformers have them."""
    return [{"label": label.label, "score": label.score} for label in labels]


def pipeline_of(task: str, source: Path) -> Any:
    """A pipeline of transformers. As here, what looks like a special token in a text is text."""
    import transformers  # takes seconds, which not every process of a run has

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, split_special_tokens=True)
    return transformers.pipeline(task, model=str(source), tokenizer=tokenizer, device="cpu")


def _in_order(
    ours: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], tolerance: float
) -> list[Mapping[str, Any]]:
    """Ours in the order of the reference as far as scores are too close to have one, with the reference's own where it
    was cut there.
    """
    if any(abs(found["score"] - wanted["score"]) > tolerance for found, wanted in zip(ours, expected, strict=False)):
        return list(ours)
    waiting = list(ours)
    ordered: list[Mapping[str, Any]] = []
    for wanted in expected:
        near = [found for found in waiting if abs(found["score"] - wanted["score"]) <= tolerance]
        same = [found for found in near if {**found, "score": 0} == {**wanted, "score": 0}]
        is_cut = bool(ours) and abs(ours[-1]["score"] - wanted["score"]) <= tolerance
        chosen = (same or near or waiting)[:1]
        ordered += [{**wanted, "score": chosen[0]["score"]}] if chosen and is_cut and not same else chosen
        waiting = [found for found in waiting if not any(found is taken for taken in chosen)]
    return ordered + waiting


def _difference(ours: Any, expected: Any, tolerance: float) -> tuple[float, str]:
    """The largest difference of two values' numbers, and what is wrong, if anything."""
    if isinstance(expected, float) and isinstance(ours, int | float):
        difference = abs(ours - expected)
        return difference, "" if difference <= tolerance else f"{ours!r}, expected {expected!r}"  # false for NaN too
    if isinstance(expected, Mapping) and isinstance(ours, Mapping) and set(ours) == set(expected):
        return _largest([(str(key), *_difference(ours[key], value, tolerance)) for key, value in expected.items()])
    if isinstance(expected, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(expected):
        pairs = enumerate(zip(ours, expected, strict=True))
        return _largest([(str(index), *_difference(found, wanted, tolerance)) for index, (found, wanted) in pairs])
    return 0.0, "" if ours == expected else f"{ours!r}, expected {expected!r}"


def _largest(parts: list[tuple[str, float, str]]) -> tuple[float, str]:
    problem = next((f"{name}: {problem}" for name, _, problem in parts if problem), "")
    return max((difference for _, difference, _ in parts), default=0.0), problem
