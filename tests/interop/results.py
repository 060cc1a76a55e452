"""What came of the cases: a file, and the page that is made of it.

Run: python -m tests.interop.results FILE > docs/interop.md
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

RESTART = "restarts under load"
_PASSES, _NOT_RUN = "✓", "–"
_SECURE = ("TLS", "mTLS")
_INTRODUCTION = """# gRPC interoperability

Made from the results of `make interop` by `tests/interop/results.py`; do not edit.

Each client runs the [cases](../tests/interop/cases.py) against a server that echoes behind the gRPC door of all
services; the case "inference" calls `serve all`. Behind the proxies, the client is grpcio.
"""
# Of Debian, by the names that the table has.
_PACKAGES = {
    "grpc-go": "golang-google-grpc-dev",
    "grpc-java": "libgrpc-java",
    "curl": "curl",
    "nginx": "nginx-light",
    "HAProxy": "haproxy",
}


@dataclass(frozen=True, slots=True)
class Result:
    """`problem`: empty where the case passed. `reason`: of a failure that is known. `figures`: what was measured."""

    client: str
    security: str
    case: str
    problem: str = ""
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def write(path: Path, results: Iterable[Result]) -> None:
    """Writes the file. A result replaces the one that the file has of the same case."""
    every = {_key(result): result for result in [*(read(path) if path.exists() else []), *results]}
    rows = [asdict(result) for _, result in sorted(every.items())]
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")


def read(path: Path) -> Sequence[Result]:
    """The results of the file."""
    return [Result(**row) for row in json.loads(path.read_text())]


def _key(result: Result) -> tuple[str, str, str]:
    return (result.client, result.security, result.case)


def page(results: Sequence[Result], clients: Sequence[str], cases: Sequence[str]) -> str:
    """The page, with the clients and the cases in their order."""
    return "\n".join(_lines(results, clients, cases)) + "\n"


def _lines(results: Sequence[Result], clients: Sequence[str], cases: Sequence[str]) -> Iterator[str]:
    yield _INTRODUCTION
    yield f"Versions: {', '.join(f'{name} {number}' for name, number in _versions().items())}."
    yield from ("", "## Clients and proxies", "")
    yield from _matrix([result for result in results if result.client in clients], clients, cases)
    if conformance := [result for result in results if result.client == "h2spec"]:
        yield from ("", "## Conformance to HTTP/2", "")
        yield from _conformance(conformance)
    yield from ("", "## Abuse", "")
    yield from _abuse(results)


def _versions() -> Mapping[str, str]:
    lock = json.loads(Path("tests/integration/node/package-lock.json").read_text())
    found = {"grpcio": version("grpcio"), "grpc-js": lock["packages"]["node_modules/@grpc/grpc-js"]["version"]}
    for name, package in _PACKAGES.items():
        shown = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Version}", package], check=True, capture_output=True, text=True
        )
        found[name] = shown.stdout.rpartition(":")[2].partition("-")[0].partition("+")[0]
    envoy = subprocess.run([".venv-interop/bin/envoy", "--version"], check=True, capture_output=True, text=True)
    return found | {"Envoy": envoy.stdout.partition("version: ")[2].split("/")[1]}


def _matrix(results: Sequence[Result], clients: Sequence[str], cases: Sequence[str]) -> Iterator[str]:
    notes: dict[str, int] = {}

    def note(failed: Sequence[Result]) -> str:
        """The numbers of the reasons why something failed."""
        texts = {result.reason or result.problem for result in failed}
        return ", ".join(f"[{notes.setdefault(text, len(notes) + 1)}]" for text in sorted(texts))

    yield "✓: passes. –: not run. A number: a note below."
    yield from (
        "",
        f"| | {' | '.join(name.removeprefix('grpcio, ') for name in clients)} |",
        f"|---|{'---|' * len(clients)}",
    )
    for case in cases:
        cells = []
        for client in clients:
            ran = [
                result for result in results if (result.client, result.security, result.case) == (client, "plain", case)
            ]
            failed = [result for result in ran if result.problem]
            cells.append(note(failed) or (_PASSES if ran else _NOT_RUN))
        yield f"| {case} | {' | '.join(cells)} |"
    for security in _SECURE:
        cells = []
        for client in clients:
            ran = [result for result in results if (result.client, result.security) == (client, security)]
            failed = [result for result in ran if result.problem]
            passed = {result.case for result in ran} - {result.case for result in failed}
            count = f"{len(passed)} of {len({result.case for result in ran})} {note(failed)}".rstrip()
            cells.append(count if ran else _NOT_RUN)
        yield f"| cases that pass over {security} | {' | '.join(cells)} |"
    yield ""
    yield from (f"{number}. {text}" for text, number in notes.items())


def _conformance(results: Sequence[Result]) -> Iterator[str]:
    [passed] = [f"{result.figures['passed']:g} of {result.figures['cases']:g}" for result in results if result.figures]
    yield f"[h2spec](../tests/interop/test_h2spec.py) 2.6: {passed} cases pass."
    yield from ("", "| Case that fails | Why |", "|---|---|")
    yield from (f"| {result.case.removeprefix('http2/')} | {result.reason} |" for result in results if result.problem)


def _abuse(results: Sequence[Result]) -> Iterator[str]:
    yield "The clients, and a caller whose calls must all be answered, share the server's two virtual CPUs."
    yield from ("", "| Abuse | Outcome |", "|---|---|")
    yield from (f"| {name} | {came} |" for name, came in _abuse_of(results).items())
    floods = [result for result in results if result.client == "flood" and result.problem]
    if floods:
        yield from ("", "Floods that are not borne:", "")
        yield from (f"- {flood.case}: {flood.reason}" for flood in floods)


def _abuse_of(results: Sequence[Result]) -> dict[str, str]:
    """What came of abuse, by its kind."""
    told: dict[str, str] = {}
    floods = [result for result in results if result.client == "flood"]
    if borne := [flood.figures for flood in floods if not flood.problem]:
        worst_s, mib = (max(figures[name] for figures in borne) for name in ("worst_s", "mib"))
        told["[floods](../tests/interop/floods.py) of frames"] = (
            f"{len(borne)} of {len(floods)} are borne: "
            f"others wait {worst_s:.2f} s at most, the memory grows by {mib:.0f} MiB at most"
        )
    for result in results:
        figures = result.figures
        if result.client == "fuzz":
            told["streams of mutated frames"] = f"{figures['streams']:,.0f}: no fault, {_growth(result)}"
        if result.client == "soak":
            name = f"{figures['seconds']:g} s of connections that come and go, half of them rude ({result.security})"
            told[name] = f"{figures['connections']:,.0f}: {_growth(result)}"
    if restarts := [result for result in results if result.case == RESTART]:
        calls = sum(restart.figures["calls"] for restart in restarts)
        failing = dict.fromkeys(restart.client for restart in restarts if restart.problem)
        came = f"some of {', '.join(failing)} fail" if failing else "none fails"
        told["restarts under callers without a retry policy"] = f"{calls:,.0f} calls, {came}"
    return told


def _growth(result: Result) -> str:
    return f"{result.figures['growth_mib']:+.1f} MiB"


def main() -> None:
    """Writes the page of a file."""
    from tests.interop.cases import CASES
    from tests.interop.run import CLIENTS

    cases = [*(case.name for case in CASES), RESTART]
    print(page(read(Path(sys.argv[1])), [client.name for client in CLIENTS], cases), end="")


if __name__ == "__main__":
    main()
