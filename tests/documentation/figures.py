"""Writes figures of docs/benchmarks into README.md and docs/: `python -m tests.documentation.figures [--check]`.

It writes docs/throughput.svg, and the parts of pages between `<!-- NAME: made by tests/documentation/figures.py -->`
and `<!-- end -->`. Each figure is a median of results.json, with the date and the machine of its section.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from neuronpipe.measure.figures import markdown_table
from tests.bench.measurements import number
from tests.documentation.chart import Group, Server, chart, rounded
from tests.documentation.pages import ROOT

_BENCHMARKS = ROOT / "docs" / "benchmarks"
_AMX, _VNNI, _OLD = "with-vnni-bfloat16-amx", "with-vnni-bfloat16", "without-vnni"
_SHORT = {_AMX: "CPU with AMX", _VNNI: "CPU with VNNI and bfloat16", _OLD: "CPU without VNNI"}
# An instance with as many CPUs of the same kind, whose price stands for that of the machine.
_INSTANCES = {_AMX: "c7i.large", _VNNI: "c7a.large"}
_DTYPES = ("float32", "bfloat16", "int8")
_MANY, _ONE = 32, 1
# The machine on which all servers had the same graph.
_GRAPH = _VNNI
_OURS = "serve all"
# In the order of the tables. A server of the results that has no name here is shown by its own, after the others.
_SERVERS = {
    _OURS: "neuronpipe",
    "litserve": "LitServe",
    "triton": "Triton, Python back end",
    "ray": "Ray Serve",
    "infinity": "Infinity",
    "onnxruntime": "ONNX Runtime behind FastAPI (its own graph)",
}
# In the chart, which has less room.
_CHART_NAMES = {"triton": "Triton (Python)", "onnxruntime": "ONNX Runtime"}
# Below the chart.
_REMARKS = {
    "triton": "Triton: with its Python back end.",
    "onnxruntime": "ONNX Runtime: behind FastAPI, with its own float32 graph.",
}
# Systems of neuronpipe that are not compared with others.
_NOT_COMPARED = {"four processes"}
_AS_WRITTEN = {
    "litserve": "LitServe",
    "triton": "Triton, Python back end",
    "ray": "Ray Serve",
    "infinity": "Infinity",
    "transformers": "`transformers` in the caller's process",
}
_GENERATION = {
    "llama, four processes": "neuronpipe, four processes",
    "llama, openvino-genai": "openvino-genai, in process",
    "llama, vllm": "vLLM, CPU build",
    "llama, transformers": "`transformers`, in process",
}
_QWEN = "qwen2.5-0.5b"
_REALISTIC_SYSTEMS = {
    "four processes": "neuronpipe, four processes",
    "openvino-genai": "openvino-genai, in process",
    "llama-cpp": "llama.cpp's server",
}
_RATIO = "Ratio in the same rounds"
_LIKE_FOR_LIKE, _PEERS, _MODELS, _TEXTS, _REALISTIC = "like for like", "peers", "models", "generation", "realistic"
# Names of targets, in the words of the pages.
_WORDS = (
    (r"(?<=the best peer's) \([^)]*\)|(?<=with the same graph) \([^)]*\)", ""),
    (r"\bto that of grpc\.aio's echo", "relative to the echo server of grpc.aio"),
    (r"\bto the echo server's", "relative to the echo server of grpc.aio"),
    (r"\bthroughput of the back end's alone", "share of the back end's own throughput"),
    # Among these peers, ONNX Runtime has a graph of its own.
    (r"\bto the best peer's with the same graph", "relative to the best peer of the same dtype"),
    (r"\bto the best peer's", "relative to the best peer"),
    (r"\bto transformers' generate", "relative to `generate` of transformers"),
    (r"\bto openvino-genai's in process", "relative to openvino-genai in process"),
    (r"\bto ctranslate2's in process", "relative to CTranslate2 in process"),
    (r"\bto that without", "relative to no shared prefix"),
    (r"\bgap between tokens to the median", "gap between tokens relative to the median"),
    (r"\b1 callers", "1 caller"),
    (r"goodput, of capacity", "goodput as a share of the capacity"),
    (r"time a token beyond the engine's alone", "time per token beyond the engine alone"),
)
_OF_THE_BEST = re.compile(rf"{_OURS}, (\w+), {_MANY} callers: throughput to the best peer's with the same graph")


@cache
def _results(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((_BENCHMARKS / folder / "results.json").read_text())
    return results


@cache
def _prices() -> dict[str, Any]:
    path = ROOT / "services" / "neuronpipe" / "measure" / "benchmark" / "prices.json"
    prices: dict[str, Any] = json.loads(path.read_text())
    return prices


@cache
def _agreements() -> Mapping[str, float]:
    """The agreement of the benchmark's classifier with PyTorch in float32, by dtype."""
    rows = json.loads((_BENCHMARKS / "accuracy.json").read_text())["rows"]
    return {row["dtype"]: row["agreement"] for row in rows if row["model"] == "classifier"}


def _date(folder: str, section: str) -> str:
    return str(_results(folder)["sections"][section])[:10]


def _link(folder: str, above: str = "benchmarks/") -> str:
    return f"[{_SHORT[folder]}]({above}{folder}/README.md)"


@dataclass(frozen=True, slots=True)
class _Speed:
    """Medians over the rounds: texts or tokens per second, and p50."""

    per_s: float
    p50_ms: float


def _speeds(folder: str, section: str, callers: int) -> dict[str, _Speed]:
    """The figures of each system of a section."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for measured in _results(folder)["measurements"]:
        if (measured["section"], measured["callers"]) == (section, callers):
            rounds.setdefault(measured["system"], []).append(measured)
    return {
        system: _Speed(
            statistics.median(turn["throughput_per_s"] for turn in turns),
            statistics.median((turn["latencies_ms"] or {}).get("p50", 0.0) for turn in turns),
        )
        for system, turns in rounds.items()
    }


def _best(folder: str, section: str, server: str, dtype: str = "") -> tuple[float, float]:
    """The most texts per second with many callers, and the lowest p50 with one, each with its best settings."""

    def fitting(callers: int) -> list[_Speed]:
        found = _speeds(folder, section, callers).items()
        return [speed for name, speed in found if name.startswith(server) and name.endswith(dtype)]

    return max(speed.per_s for speed in fitting(_MANY)), min(speed.p50_ms for speed in fitting(_ONE))


def _leads(folder: str, server: str, dtype: str) -> list[float]:
    """Our throughput relative to the best settings of a server, in each of the rounds of both."""
    rates: dict[str, dict[int, float]] = {}
    for measured in _results(folder)["measurements"]:
        if (measured["section"], measured["callers"]) == (_LIKE_FOR_LIKE, _MANY):
            rates.setdefault(measured["system"], {})[measured["round"]] = measured["throughput_per_s"]
    ours = rates[f"{_OURS}, {dtype}"]
    quotients = [
        [ours[turn] / rate for turn, rate in by_round.items()]
        for system, by_round in rates.items()
        if system.startswith(server) and system.endswith(dtype)
    ]
    return min(quotients, key=statistics.median)


def _ratio(server: str, dtype: str) -> str:
    """Our throughput relative to a server: median, least and most."""
    leads = _leads(_GRAPH, server, dtype)
    return f"{statistics.median(leads):.2f} ({min(leads):.2f}–{max(leads):.2f})"


def _price(folder: str, per_s: float) -> str:
    """The price of a million texts on a machine that is always busy."""
    return f"{_prices()['instances'][_INSTANCES[folder]]['on_demand_per_hour'] / (per_s * 3600) * 1e6:.2f}"


def _head(folder: str, section: str) -> str:
    prices = f"{_INSTANCES[folder]} on demand, {_prices()['date']}"
    return f"{_link(folder)}, {_date(folder, section)}, 2 virtual CPUs; prices: {prices}:"


def _servers(folder: str, dtype: str) -> set[str]:
    """The servers that were measured with a graph of the dtype, ours among them."""
    few, many = (
        {
            re.split(r" --|, ", system)[0]
            for system in _speeds(folder, _LIKE_FOR_LIKE, callers)
            if system.endswith(dtype)
        }
        for callers in (_ONE, _MANY)
    )
    return (few & many) - _NOT_COMPARED


def _like_for_like(dtype: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Each server that was measured with a graph of the dtype, with its figures by `_best`."""
    found = _servers(_GRAPH, dtype)
    for server in [*(server for server in _SERVERS if server in found), *sorted(found - _SERVERS.keys())]:
        yield server, _best(_GRAPH, _LIKE_FOR_LIKE, server, dtype)


def _name(server: str) -> str:
    return _SERVERS.get(server, server)


def _same_graph() -> Iterator[str]:
    """The table of servers that have the same graph, dtype and tokenizer."""
    yield _head(_GRAPH, _MODELS)
    yield ""
    rows = []
    for dtype in _DTYPES:
        for server, (per_s, p50_ms) in _like_for_like(dtype):
            agreement = f"{_agreements()[dtype]:.3f}"
            ratio = _ratio(server, dtype) if server != _OURS else ""
            figures = (rounded(per_s), ratio, rounded(p50_ms), _price(_GRAPH, per_s))
            rows.append([dtype, agreement, _name(server), *figures])
    heading = ["", "Agreement", "Server", "Texts/s, 32 callers", _RATIO, "p50 ms, 1 caller", "$ per million texts"]
    yield from markdown_table(heading, rows)


def _as_people_write() -> Iterator[str]:
    """The table of servers as people write them, in PyTorch and float32, beside ours in each dtype."""
    yield _head(_VNNI, _PEERS)
    yield ""
    rows = []
    for dtype in _DTYPES:
        per_s, p50_ms = _best(_VNNI, _PEERS, _OURS, dtype)
        figures = (rounded(per_s), rounded(p50_ms), _price(_VNNI, per_s))
        rows.append([f"neuronpipe, {dtype}", f"{_agreements()[dtype]:.3f}", *figures])
    for server, name in _AS_WRITTEN.items():
        per_s, p50_ms = _best(_VNNI, _PEERS, server)
        rows.append([f"{name}, float32", "1", rounded(per_s), rounded(p50_ms), _price(_VNNI, per_s)])
    heading = ["Server", "Agreement", "Texts/s, 32 callers", "p50 ms, 1 caller", "$ per million texts"]
    yield from markdown_table(heading, rows)


def _generated_texts() -> Iterator[str]:
    """The table of generators, on both machines."""
    machines = [(folder, _date(folder, _TEXTS)) for folder in (_VNNI, _AMX)]
    yield "; ".join(f"{_link(folder)}, {date}" for folder, date in machines) + ":"
    yield ""
    columns = {
        f"{callers}, {'AMX' if folder == _AMX else 'VNNI'}": _speeds(folder, _TEXTS, callers)
        for folder, _ in machines
        for callers in (1, 8, 32)
    }
    yield from _tokens_table(columns, _GENERATION)


def _realistic_texts() -> Iterator[str]:
    """The table of generators with a model of realistic size."""
    yield f"{_link(_GRAPH)}, {_date(_GRAPH, _REALISTIC)}:"
    yield ""
    columns = {
        f"{callers}, {dtype.replace('-', ' ')}": {
            system.removeprefix(f"{_QWEN}, {dtype}, "): speed
            for system, speed in _speeds(_GRAPH, _REALISTIC, callers).items()
        }
        for dtype in ("int8-weights", "bfloat16")
        for callers in (1, 8)
    }
    yield from _tokens_table(columns, _REALISTIC_SYSTEMS)


def _tokens_table(columns: Mapping[str, Mapping[str, _Speed]], systems: Mapping[str, str]) -> Iterator[str]:
    """The tokens per second of systems, which have names, in columns with headings."""
    rows = [[name, *(rounded(speeds[system].per_s) for speeds in columns.values())] for system, name in systems.items()]
    yield from markdown_table(["Tokens/s, by callers", *columns], rows)


def _accuracy() -> Iterator[str]:
    """The table of the agreement of each model in each dtype."""
    results = json.loads((_BENCHMARKS / "accuracy.json").read_text())
    machine = results["machine"]
    yield f"{machine['CPU']}, {machine['instructions']}; {machine['date'][:10]}:"
    yield ""
    rows = [
        [row["model"], row["dtype"], f"{row['agreement']:.4f}", row["meaning"], f"{row['largest_difference']:.2g}"]
        for row in results["rows"]
    ]
    yield from markdown_table(["Model", "dtype", "Agreement", "Meaning", "Largest difference"], rows)


def _missed() -> Iterator[str]:
    """The table of all targets that any machine missed."""
    folders = (_AMX, _VNNI, _OLD)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for folder in folders:
        for target in _results(folder)["targets"]:
            if target["measured"]:
                found.setdefault(_in_words(target["name"]), {})[folder] = target
    counts = []
    for folder in folders:
        targets = [by_folder[folder] for by_folder in found.values() if folder in by_folder]
        missed = sum(not target["is_met"] for target in targets)
        unmeasured = sum(not target["measured"] for target in _results(folder)["targets"])
        date = _results(folder)["machine"]["date"][:10]
        counts.append(f"{missed} of {len(targets)} on the {_link(folder, '')} ({date}; {unmeasured} not measured)")
    yield f"Missed: {', '.join(counts)}. Bold: missed."
    yield ""
    heading = ["Target", *("AMX" if folder == _AMX else _SHORT[folder][4:] for folder in folders)]
    rows = [
        [name, *(_outcome(folder, by_folder.get(folder)) for folder in folders)]
        for name, by_folder in found.items()
        if not all(target["is_met"] for target in by_folder.values())
    ]
    yield from markdown_table(heading, rows)


def _in_words(name: str) -> str:
    for pattern, words in _WORDS:
        name = re.sub(pattern, words, name)
    return name


def _outcome(folder: str, target: Mapping[str, Any] | None) -> str:
    """A figure and the limit that it was to keep, as `0.77, ≥ 1.00`."""
    if not target:
        return ""
    median, unit = target["measured"]["median"], target["unit"].strip()
    figure, limit = number(median), number(target["limit"])
    if figure == limit and not target["is_met"]:
        figure = f"{median:.4g}"
    shown = figure if target["is_met"] else f"**{figure}**"
    shown = f"{shown}{_smaller_lead(folder, target)}, {'≥' if target['is_at_least'] else '≤'}"
    return f"{shown} {limit} {unit}".rstrip()


def _smaller_lead(folder: str, target: Mapping[str, Any]) -> str:
    """The smallest lead, where it is not the lead over the best peer, as ` (1.56: LitServe)`.

    The best peer has the highest median. The rounds of another one may be those in which the machine was slower.
    """
    if not (found := _OF_THE_BEST.match(target["name"])):
        return ""
    leads = {
        server: statistics.median(_leads(folder, server, found[1])) for server in _servers(folder, found[1]) - {_OURS}
    }
    server = min(leads, key=lambda name: leads[name])
    figure = number(leads[server])
    if figure == number(target["measured"]["median"]):
        return ""
    return f" ({figure if leads[server] >= target['limit'] else f'**{figure}**'}: {_name(server)})"


_PARTS = {
    "same graph": _same_graph,
    "as people write": _as_people_write,
    "generated texts": _generated_texts,
    "realistic texts": _realistic_texts,
    "missed targets": _missed,
    "accuracy": _accuracy,
}
_PART = re.compile(r"(?<=<!-- )([\w ]+)(: made by tests/documentation/figures\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_PAGES = (ROOT / "docs" / "comparison.md", _BENCHMARKS / "README.md")


def _chart() -> str:
    """docs/throughput.svg: throughput and p50 beside peers with the same graph, and the agreement of each dtype."""
    groups = []
    for dtype in _DTYPES:
        servers = [Server(_chart_name(server), *figures, server == _OURS) for server, figures in _like_for_like(dtype)]
        servers.sort(key=lambda server: (not server.is_ours, -server.per_s))
        agreement = _agreements()[dtype]
        others = round((1 - agreement) * 100)
        differ = f": {others} of 100 labels differ" if others else ""
        groups.append(Group(dtype, f"agreement {agreement:.3f}{differ}", servers))
    shown = {server.name for group in groups for server in group.servers}
    remarks = [remark for server, remark in _REMARKS.items() if _chart_name(server) in shown]
    machine = f"{_SHORT[_GRAPH]}, 2 virtual CPUs, {_date(_GRAPH, _MODELS)}."
    return chart(
        groups,
        [f"MiniLM classifier, the same OpenVINO graph and tokenizer in each server. {machine} Bold: best.", *remarks],
    )


def _chart_name(server: str) -> str:
    return _CHART_NAMES.get(server, _name(server))


def _files() -> Iterator[tuple[Path, str]]:
    """The files, and what they should contain."""
    yield ROOT / "docs" / "throughput.svg", _chart()
    for page in _PAGES:
        text = page.read_text(encoding="utf-8")
        yield page, _PART.sub(lambda part: f"{part[1]}{part[2]}\n{_lines(_PARTS[part[1]]())}\n{part[4]}", text)


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def faults() -> Sequence[str]:
    """The files that are not what the results say."""
    return [
        str(path.relative_to(ROOT))
        for path, content in _files()
        if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if wrong := faults():
            sys.exit(f"{', '.join(wrong)}: not what docs/benchmarks says; run: python -m tests.documentation.figures")
    else:
        for file, expected in list(_files()):
            file.write_text(expected, encoding="utf-8")
