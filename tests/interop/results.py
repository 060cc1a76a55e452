"""What came of the cases: a file, and the page that is made of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Result:
    """`problem`: empty where the case passed. `reason`: of a failure that is known."""

    transport: str
    client: str
    security: str
    case: str
    problem: str = ""
    reason: str = ""


def write(path: Path, results: Iterable[Result]) -> None:
    """Writes the file. A result replaces the one that the file has of the same case."""
    every = {_key(result): result for result in [*(read(path) if path.exists() else []), *results]}
    rows = [asdict(result) for _, result in sorted(every.items())]
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def read(path: Path) -> Sequence[Result]:
    """The results of the file."""
    return [Result(**row) for row in json.loads(path.read_text())]


def _key(result: Result) -> tuple[str, str, str, str]:
    return (result.transport, result.client, result.security, result.case)
