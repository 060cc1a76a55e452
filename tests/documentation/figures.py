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
from html import escape
from pathlib import Path
from typing import Any

from neuronpipe.measure.figures import markdown_table
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
_SERVERS = {"serve all": "neuronpipe", "litserve": "LitServe", "triton": "Triton, Python back end"}
_MORE_SERVERS = {
    "ray": "Ray Serve",
    "infinity": "Infinity",
    "onnxruntime": "ONNX Runtime behind FastAPI (its own graph)",
}
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
    (r" \((?:litserve|triton|transformers|not measured)[^)]*\)", ""),
    (r"\bto that of grpc\.aio's echo", "relative to the echo server of grpc.aio"),
    (r"\bto the echo server's", "relative to the echo server of grpc.aio"),
    (r"\bthroughput of the back end's alone", "share of the back end's own throughput"),
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


def _link(folder: str) -> str:
    return f"[{_SHORT[folder]}](benchmarks/{folder}/README.md)"


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


def _ratio(server: str, dtype: str) -> str:
    """Our throughput relative to the best settings of a server, in the rounds of both: median, least and most."""
    rates: dict[str, dict[int, float]] = {}
    for measured in _results(_GRAPH)["measurements"]:
        if (measured["section"], measured["callers"]) == (_LIKE_FOR_LIKE, _MANY):
            rates.setdefault(measured["system"], {})[measured["round"]] = measured["throughput_per_s"]
    ours = rates[f"serve all, {dtype}"]
    quotients = [
        [ours[number] / rate for number, rate in by_round.items()]
        for system, by_round in rates.items()
        if system.startswith(server) and system.endswith(dtype)
    ]
    fewest = min(quotients, key=statistics.median)
    return f"{statistics.median(fewest):.2f} ({min(fewest):.2f}–{max(fewest):.2f})"


def _price(folder: str, per_s: float) -> str:
    """The price of a million texts on a machine that is always busy."""
    return f"{_prices()['instances'][_INSTANCES[folder]]['on_demand_per_hour'] / (per_s * 3600) * 1e6:.2f}"


def _rounded(figure: float) -> str:
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}"


def _head(folder: str, section: str) -> str:
    prices = f"{_INSTANCES[folder]} on demand, {_prices()['date']}"
    return f"{_link(folder)}, {_date(folder, section)}, 2 virtual CPUs; prices: {prices}:"


def _same_graph() -> Iterator[str]:
    """The table of servers that have the same graph, dtype and tokenizer."""
    yield _head(_GRAPH, _MODELS)
    yield ""
    rows = []
    for dtype in _DTYPES:
        measured = _speeds(_GRAPH, _LIKE_FOR_LIKE, _MANY)
        for server, name in (_SERVERS | _MORE_SERVERS).items():
            if not any(system.startswith(server) and system.endswith(dtype) for system in measured):
                continue
            per_s, p50_ms = _best(_GRAPH, _LIKE_FOR_LIKE, server, dtype)
            agreement = f"{_agreements()[dtype]:.3f}"
            ratio = _ratio(server, dtype) if server != "serve all" else ""
            rows.append([dtype, agreement, name, _rounded(per_s), ratio, _rounded(p50_ms), _price(_GRAPH, per_s)])
    heading = ["", "Agreement", "Server", "Texts/s, 32 callers", _RATIO, "p50 ms, 1 caller", "$ per million texts"]
    yield from markdown_table(heading, rows)


def _as_people_write() -> Iterator[str]:
    """The table of servers as people write them, in PyTorch and float32, beside ours in each dtype."""
    yield _head(_VNNI, _PEERS)
    yield ""
    rows = []
    for dtype in _DTYPES:
        per_s, p50_ms = _best(_VNNI, _PEERS, "serve all", dtype)
        figures = (_rounded(per_s), _rounded(p50_ms), _price(_VNNI, per_s))
        rows.append([f"neuronpipe, {dtype}", f"{_agreements()[dtype]:.3f}", *figures])
    for server, name in _AS_WRITTEN.items():
        per_s, p50_ms = _best(_VNNI, _PEERS, server)
        rows.append([f"{name}, float32", "1", _rounded(per_s), _rounded(p50_ms), _price(_VNNI, per_s)])
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
    rows = [
        [name, *(_rounded(speeds[system].per_s) for speeds in columns.values())] for system, name in systems.items()
    ]
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
        counts.append(f"{missed} of {len(targets)} on the {_link(folder)} ({_results(folder)['machine']['date'][:10]})")
    yield f"Missed: {counts[0]}; {counts[1]}; {counts[2]}. Bold: missed."
    yield ""
    heading = ["Target", *("AMX" if folder == _AMX else _SHORT[folder][4:] for folder in folders)]
    rows = [
        [name, *(_outcome(by_folder.get(folder)) for folder in folders)]
        for name, by_folder in found.items()
        if not all(target["is_met"] for target in by_folder.values())
    ]
    yield from markdown_table(heading, rows)


def _in_words(name: str) -> str:
    for pattern, words in _WORDS:
        name = re.sub(pattern, words, name)
    return name


def _outcome(target: Mapping[str, Any] | None) -> str:
    """A figure and the limit that it was to keep, as `0.77, ≥ 1.00`."""
    if not target:
        return ""
    figure, unit = _as_on_the_page(target["measured"]["median"]), target["unit"].strip()
    shown = f"{figure if target['is_met'] else f'**{figure}**'}, {'≥' if target['is_at_least'] else '≤'}"
    return f"{shown} {_as_on_the_page(target['limit'])} {unit}".rstrip()


def _as_on_the_page(figure: float) -> str:
    """Three digits, but no more than two decimals."""
    return f"{figure:.{0 if abs(figure) >= 100 else 1 if abs(figure) >= 10 else 2}f}"


_PARTS = {
    "same graph": _same_graph,
    "as people write": _as_people_write,
    "generated texts": _generated_texts,
    "realistic texts": _realistic_texts,
    "missed targets": _missed,
    "accuracy": _accuracy,
}
_PART = re.compile(r"(?<=<!-- )([\w ]+)(: made by tests/documentation/figures\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_PAGES = tuple(ROOT / "docs" / name for name in ("comparison.md", "limits.md"))

_WIDTH, _HEIGHT, _TOP, _BASE = 380, 300, 66, 236
_COLOURS = ("ours", "first", "second")
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#24292f}.note{fill:#57606a;font-size:12px}
.title{font-weight:600;font-size:14px}.ours{fill:#0969da}.first{fill:#8c959f}.second{fill:#c5cbd3}.axis{stroke:#d0d7de}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.ours{fill:#58a6ff}.first{fill:#6e7681}
.second{fill:#484f58}.axis{stroke:#30363d}}
"""


def chart() -> str:
    """docs/throughput.svg: throughput and p50 beside peers with the same graph, and the agreement of each dtype."""
    found = {(dtype, server): _best(_GRAPH, _LIKE_FOR_LIKE, server, dtype) for dtype in _DTYPES for server in _SERVERS}
    panels = ("Texts per second, 32 callers: more is better", "p50 in ms, 1 caller: less is better")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" width="{2 * _WIDTH}" '
        f'height="{_HEIGHT}">',
        f"<style>{_STYLE}</style>",
    ]
    for number, (server, colour) in enumerate(zip(_SERVERS, _COLOURS, strict=True)):
        x = 16 + 170 * number
        lines.append(f'<rect class="{colour}" x="{x}" y="12" width="12" height="12" rx="2"/>')
        lines.append(f'<text x="{x + 18}" y="23">{escape(_SERVERS[server])}</text>')
    for panel, title in enumerate(panels):
        lines += _panel(panel * _WIDTH, title, {key: figures[panel] for key, figures in found.items()})
    lines.append(
        f'<text class="note" x="16" y="{_HEIGHT - 8}">MiniLM classifier, the same OpenVINO graph and tokenizer in each '
        f"server. {_SHORT[_GRAPH]}, 2 virtual CPUs, {_date(_GRAPH, _MODELS)}.</text>"
    )
    return "".join(f"{line}\n" for line in [*lines, "</svg>"])


def _panel(left: int, title: str, figures: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Three bars for each dtype, with their figures above them."""
    yield f'<text class="title" x="{left + 16}" y="50">{escape(title)}</text>'
    yield f'<line class="axis" x1="{left + 16}" x2="{left + _WIDTH - 16}" y1="{_BASE}" y2="{_BASE}"/>'
    scale = (_BASE - _TOP - 20) / max(figures.values())
    for group, dtype in enumerate(_DTYPES):
        x = left + 22 + group * (_WIDTH - 32) / len(_DTYPES)
        for number, (server, colour) in enumerate(zip(_SERVERS, _COLOURS, strict=True)):
            height, middle = figures[dtype, server] * scale, x + 36 * number + 16
            yield (
                f'<rect class="{colour}" x="{middle - 16:.1f}" y="{_BASE - height:.1f}" width="32" '
                f'height="{height:.1f}" rx="2"/>'
            )
            yield (
                f'<text x="{middle:.1f}" y="{_BASE - height - 5:.1f}" text-anchor="middle">'
                f"{_rounded(figures[dtype, server])}</text>"
            )
        yield f'<text x="{x + 52:.1f}" y="{_BASE + 18}" text-anchor="middle">{dtype}</text>'
        agreement = f"agreement {_agreements()[dtype]:.3f}"
        yield f'<text class="note" x="{x + 52:.1f}" y="{_BASE + 34}" text-anchor="middle">{agreement}</text>'


def _files() -> Iterator[tuple[Path, str]]:
    """The files, and what they should contain."""
    yield ROOT / "docs" / "throughput.svg", chart()
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
