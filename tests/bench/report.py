"""A run as JSON, with every round, and as a page."""

import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from neuronpipe.measure.figures import markdown_table
from tests.bench import (
    against_peers,
    embedding_peers,
    generation,
    generation_realistic,
    models,
    overhead,
    overload,
    scaling,
    telemetry,
)
from tests.bench.against_peers import LIKE_FOR_LIKE, NOT_TO_BE_HAD, TRIALS
from tests.bench.generation_peers import GENERATION_PEERS
from tests.bench.measurements import Measurement, Measurements, Spread, Value, figure, latency, number, p50, throughput
from tests.bench.models import CEILING
from tests.bench.startup import SERVICES, Start
from tests.bench.systems import ALL, DTYPES, FOUR, OUR_ECHO, of_dtype
from tests.bench.targets import Target, best_peer, check_targets


@dataclass
class Run:
    """All that a page is made of. `sections`: when and how each was measured."""

    command: str
    machine: Mapping[str, str]
    rounds: int
    seconds: float
    measurements: list[Measurement] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


def keep_sections(run: Run, folder: Path, measured: Collection[str]) -> None:
    """Adds the sections of the page in the folder that are not `measured` now. Raises SystemExit for another CPU."""
    content = json.loads((folder / "results.json").read_text())
    if (cpu := content["machine"]["instructions"]) != run.machine["instructions"]:
        raise SystemExit(f"{folder}: was measured on a CPU with {cpu}; it is kept as it is")
    # Both are measured by the section of models.
    parts = {*measured, LIKE_FOR_LIKE, TRIALS} if models.SECTION in measured else set(measured)
    if embedding_peers.SECTION in measured:
        parts.add(embedding_peers.TRIALS)
    run.sections |= {name: how for name, how in content.get("sections", {}).items() if name not in measured}
    run.measurements += [Measurement(**turn) for turn in content["measurements"] if turn["section"] not in parts]
    if "start" not in measured:
        run.starts += [Start(**start) for start in content["starts"]]
    for name, reason in content["unavailable"].items():
        if _section_of(name) not in parts:
            run.unavailable[name] = reason


# Sections that a peer's reason names.
_NAMED = (LIKE_FOR_LIKE, embedding_peers.SECTION, generation_realistic.SECTION)


def _section_of(peer: str) -> str:
    """The section of a peer that could not be measured."""
    named = next((name for name in _NAMED if peer.startswith(f"{name}: ")), "")
    return named or (generation.SECTION if peer in GENERATION_PEERS else against_peers.SECTION)


def write_report(run: Run, folder: Path) -> str:
    """Writes results.json and README.md; returns the page."""
    found = Measurements(run.measurements)
    targets = check_targets(found)
    page = "\n".join(_page(run, found, targets)) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    checked = [{**asdict(target), "is_met": target.is_met} for target in targets]
    (folder / "results.json").write_text(json.dumps({**asdict(run), "targets": checked}, indent=1) + "\n")
    (folder / "README.md").write_text(page)
    return page


def _page(run: Run, found: Measurements, targets: Sequence[Target]) -> Iterator[str]:
    yield from ("# Benchmark", "")
    yield (
        f"Written by `make bench`, the last time by `{run.command}`; the table of sections has their dates. "
        "Every round is in [results.json](results.json). Do not edit."
    )
    yield ""
    yield (
        "In each round every system has a turn: a ratio is of two turns in the same round, so that a machine which "
        "drifts does not decide it. Figures are medians over the rounds, then the smallest and the largest. Generators "
        "ran on the same machine."
    )
    yield ""
    yield from summary(targets)
    yield from _table(("machine", ""), list(run.machine.items()))
    yield from _table(("section", "measured"), list(run.sections.items()))
    yield from ("## Targets", "")
    yield from _table(("", "target", "measured", ""), [_target_row(target) for target in targets])
    for section, (title, text, lines) in _SECTIONS.items():
        if found.systems(section):
            yield from (f"## {title}", "", text, "")
            yield from lines(_Section(found, section))
    if run.unavailable or found.systems(against_peers.SECTION) or found.systems(embedding_peers.SECTION):
        yield from ("## Peers that could not be measured", "")
        for peer, reason in (*run.unavailable.items(), *NOT_TO_BE_HAD.items()):
            yield f"- {peer}: `{' '.join(reason.split())[-400:].replace('`', '')}`"
        yield ""
    if run.starts:
        yield from _starts(run.starts)


# A line of the summary → the beginnings and the ends of the names of the targets whose medians it lists.
_SUMMARY: Mapping[str, tuple[str, str]] = {
    "32 callers, share of the back end's own throughput": ("serve all, ", "throughput of the back end's alone"),
    # Among these peers, ONNX Runtime has a graph of its own.
    "32 callers, throughput relative to the best peer of the same dtype": (
        "serve all, ",
        "throughput to the best peer's with the same graph",
    ),
    "1 caller, p50 relative to the best peer of the same dtype": (
        "serve all, ",
        "p50 to the best peer's with the same graph",
    ),
    "32 callers, throughput relative to the best peer as people write it": (
        "serve all, ",
        "throughput to the best peer's",
    ),
    "overload of 2 times the capacity and more, goodput as a share of the capacity": (
        "serve all, ",
        "x capacity: goodput, of capacity",
    ),
    "Llama, tokens/s relative to `generate` of transformers": ("llama, ", "new tokens/s to transformers' generate"),
    "Llama, tokens/s relative to openvino-genai": ("llama, ", "new tokens/s to openvino-genai's in process"),
}
_OWN_CPU = "on one CPU"


def summary(targets: Sequence[Target]) -> Iterator[str]:
    """At most ten lines: how many targets are met, and the medians of the most important ones, in their order."""
    measured = [target for target in targets if target.measured]
    met = sum(bool(target.is_met) for target in measured)
    yield from ("## Summary", "")
    yield f"- {met} of {len(measured)} targets are met, {len(measured) - met} are missed."
    for title, (begin, end) in _SUMMARY.items():
        names = (target for target in measured if target.name.startswith(begin) and _OWN_CPU not in target.name)
        found = [target for target in names if target.name.partition(" (")[0].endswith(end)]
        if found:
            dtypes = [dtype for dtype in DTYPES if any(f", {dtype}," in target.name for target in found)]
            medians = [number(target.measured.median) + target.unit for target in found if target.measured]
            of_dtypes = f" ({', '.join(dtypes)})" if dtypes else ""
            yield f"- {title}{of_dtypes}: {', '.join(medians)}"
    yield ""


def _target_row(target: Target) -> tuple[str, ...]:
    limit = f"{'≥' if target.is_at_least else '≤'} {number(target.limit)}{target.unit}"
    said = {True: "met", False: "**missed**", None: "not measured"}[target.is_met]
    return target.name, limit, _spread(target.measured, target.unit), said


_LOOP_HEADINGS = ("", "callers", "answers/s", "p50 ms", "p90 ms", "p99 ms", "errors", "CPU µs")
_SERVER_CPU = figure("server_cpu_us")


class _Section:
    """The measurements of a section, as cells."""

    def __init__(self, found: Measurements, name: str) -> None:
        self.found, self.name = found, name
        self.systems, self.callers = found.systems(name), found.callers(name)
        self.of = partial(found.of, name)
        self.spread = partial(found.spread, name)
        self.ratio = partial(found.ratio, name)

    def cells(self, system: str, callers: int, *values: Value) -> tuple[str, ...]:
        """The spread of each value."""
        return tuple(_spread(self.spread(system, callers, value)) for value in values)

    def loop(self, system: str, callers: int, name: str = "") -> tuple[str, ...]:
        """The cells of _LOOP_HEADINGS."""
        tails = (self.spread(system, callers, latency(tail)) for tail in ("p90", "p99"))
        return (
            *(name or system, str(callers)),
            *self.cells(system, callers, throughput, p50),
            *(number(tail.median) if tail else "" for tail in tails),
            str(sum(turn.errors for turn in self.of(system, callers))),
            *self.cells(system, callers, _SERVER_CPU),
        )


def _overhead(section: _Section) -> Iterator[str]:
    rows = []
    for system in section.systems:
        reference = overhead.reference_of(system)
        for callers in section.callers:
            if section.of(system, callers):
                client = (
                    section.spread(system, callers, figure(name)) for name in ("generator_cpu_us", "generator_cpu")
                )
                ratios = (
                    _spread(section.ratio(system, reference, callers, value)) if system != reference else ""
                    for value in (throughput, _SERVER_CPU, p50)
                )
                medians = (number(spread.median) if spread else "" for spread in client)
                rows.append((*section.loop(system, callers), *medians, *ratios))
    rows.sort(key=lambda row: int(row[1]))
    headings = ("client µs", "client", "of echo", "CPU to echo's", "p50 to echo's")
    yield from _table((*_LOOP_HEADINGS, *headings), rows)
    yield "Where one caller's request spends its time, as the gateway sees it (p50 in ms, hops and queues included):"
    yield ""
    parts = ("total", "preprocess", "predict", "postprocess")
    values = [figure(f"{part}_p50_ms") for part in parts]
    yield from _table(("", *parts), [(system, *section.cells(system, 1, *values)) for system in (ALL, FOUR)])


def _models(section: _Section) -> Iterator[str]:
    rows: list[tuple[str, ...]] = []
    for dtype in DTYPES:
        ceiling = of_dtype(CEILING, dtype)
        turns = section.of(ceiling, 0)
        batch = f"{turns[0].figures['batch_tokens']:.0f} tokens" if turns else ""
        rows.append((ceiling, "", *section.cells(ceiling, 0, throughput), *[""] * 6, batch, ""))
        for callers in models.CALLERS:
            for system in (of_dtype(ALL, dtype), of_dtype(FOUR, dtype)):
                ratio = section.ratio(system, ceiling, callers, throughput, reference_callers=0)
                batches = section.cells(system, callers, figure("padding", 100), figure("batch_size"))
                rows.append((*section.loop(system, callers), *batches, _spread(ratio)))
    yield from _table((*_LOOP_HEADINGS, "padding %", "batch", "of ceiling"), rows)


def _like_for_like(section: _Section) -> Iterator[str]:
    return _beside(section, TRIALS)


def _embeddings(section: _Section) -> Iterator[str]:
    return _beside(section, embedding_peers.TRIALS)


def _beside(section: _Section, trials_section: str) -> Iterator[str]:
    """The systems of each dtype, with ratios of ours in the same rounds, and the settings that were tried."""
    rows = []
    for dtype in DTYPES:
        ours = [of_dtype(system, dtype) for system in (ALL, FOUR)]
        # Ours first, then each peer's.
        systems = [system for system in section.systems if system.endswith(f", {dtype}")]
        systems.sort(key=lambda system: system not in ours)
        for callers in against_peers.CALLERS:
            value, is_high = (throughput, True) if callers > 1 else (p50, False)
            best = best_peer(section.found, callers, value, is_high=is_high, section=section.name, dtype=dtype)
            for system in (system for system in systems if section.of(system, callers)):
                ratios = (
                    _spread(section.ratio(mine, system, callers, value)) if system not in ours else ""
                    for value in (throughput, p50)
                    for mine in ours
                )
                rows.append((*section.loop(system, callers, _bold(system, is_bold=system == best)), *ratios))
    headings = (f"{what}, {system}" for what in ("answers/s", "p50") for system in (ALL, FOUR))
    yield from _table((*_LOOP_HEADINGS, *headings), rows)
    yield "The settings that were tried, one turn each:"
    yield ""
    trials, (alone, many) = _Section(section.found, trials_section), against_peers.CALLERS
    rows = [
        (system, *trials.cells(system, many, throughput), *trials.cells(system, alone, p50))
        for system in trials.systems
    ]
    yield from _table(("", "answers/s, 32 callers", "p50 ms, 1 caller"), rows)


def _peers(section: _Section) -> Iterator[str]:
    ours = [of_dtype(ALL, dtype) for dtype in DTYPES]
    rows = []
    for callers in section.callers:
        best = best_peer(section.found, callers, throughput, is_high=True)
        for system in section.systems:
            ratios = (
                _spread(section.ratio(mine, system, callers, throughput)) if system not in ours else "" for mine in ours
            )
            rows.append((*section.loop(system, callers, _bold(system, is_bold=system == best)), *ratios))
    yield from _table((*_LOOP_HEADINGS, *DTYPES), rows)


def _overload(section: _Section) -> Iterator[str]:
    columns = {
        "capacity/s": figure("capacity_per_s"),
        "offered/s": figure("offered_per_s"),
        "goodput/s": throughput,
        "of capacity %": figure("goodput_of_capacity", 100),
        "answered of computed %": figure("wanted", 100),
        "left": figure("left_while_computing"),
        "refused": figure("refused"),
        "generator CPU": figure("generator_cpu"),
        "lag p99 ms": figure("send_lag_p99_ms"),
    }
    callers = overload.CALLERS
    rows = [
        (
            *(system, *section.cells(system, callers, *columns.values())),
            str(sum(turn.errors for turn in section.of(system, callers))),
        )
        for system in section.systems
    ]
    yield from _table(("", *columns, "errors"), rows)


def _telemetry(section: _Section) -> Iterator[str]:
    lost = [system for system in section.systems if system.startswith(telemetry.LOST)]
    rows = []
    for system in (system for system in section.systems if system not in lost):
        reference = f"{system.rpartition(', ')[0]}, {telemetry.OFF}"
        for callers in (telemetry.CALLERS, *telemetry.COVERAGE_CALLERS):
            if section.of(system, callers):
                ratio = section.ratio(system, reference, callers, throughput)
                covered = section.cells(system, callers, figure("covered", 100), figure("covered_least", 100))
                rows.append((*section.loop(system, callers), _spread(ratio), *covered))
    yield from _table((*_LOOP_HEADINGS, "to off", "covered %", "least covered %"), rows)
    values = [figure(name) for name in ("requests", "complete_traces", "spans")]
    rows = [(system, *section.cells(system, telemetry.CALLERS, *values)) for system in lost]
    yield from _table(("", "requests", "complete traces", "spans, batches included"), rows)


def _generation(section: _Section) -> Iterator[str]:
    long, overloaded = generation.LONG_PROMPTS, generation.OVERLOAD
    rows = [
        (*section.loop(system, callers), *section.cells(system, callers, figure("itl_p50_ms")))
        for system in section.systems
        if system not in (long, overloaded)
        for callers in section.callers
        if section.of(system, callers)
    ]
    yield from _table((*_LOOP_HEADINGS[:2], "tokens/s", *_LOOP_HEADINGS[3:], "between tokens, ms"), rows)
    callers = generation.GAP_CALLERS
    yield f"{callers} texts, while a prompt of 2,000 tokens comes every other second; times between tokens in ms:"
    yield ""
    names = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "longest_to_median")
    cells = section.cells(long, callers, *map(figure, names))
    yield from _table(("median", "p99", "longest", "longest to median"), [cells])
    callers = generation.LLAMA_CALLERS[-1]
    yield (
        f"Overload: an open loop at {generation.FACTOR:g} times what {callers} callers get. Goodput counts texts with "
        f"the first token within {generation.FIRST_TOKEN_LIMIT_MS:g} ms and {generation.TOKEN_LIMIT_MS:g} ms a token; "
        "the deadline of each is what these allow for the whole text. The executor refuses prompts that would wait "
        f"{generation.MAX_PROMPT_WAIT_S:g} s for their first step (`--max-prompt-wait-s`)."
    )
    yield ""
    values = (figure("capacity_per_s"), figure("offered_per_s"), throughput, figure("goodput_of_capacity", 100), p50)
    headings = ("capacity/s", "offered/s", "goodput/s", "of capacity %", "first token p50 ms")
    yield from _table(headings, [section.cells(overloaded, callers, *values)])


def _scaling(section: _Section) -> Iterator[str]:
    rows, checks = [], []
    for arrangement in scaling.ARRANGEMENTS:
        for cpus in scaling.CHECKED_CPUS:
            turns = section.of(scaling.name_of(arrangement, cpus), scaling.CALLERS)
            if not turns:
                continue
            medians = {
                name: statistics.median(turn.figures[name] for turn in turns)
                for name in turns[0].figures
                if all(name in turn.figures for turn in turns)
            }
            costs = scaling.Costs.of(medians)
            # With two CPUs here, the generator takes a part of both; with one, it has the other.
            shared_us = medians[scaling.GENERATOR] if cpus > 1 else 0.0
            measured = statistics.median(map(throughput, turns))
            foretold = scaling.capacity(costs, cpus, shared_us)
            loops = ", ".join(f"{name} {us:.0f}" for name, us in costs.loops_us.items())
            ratio = number(measured / foretold.per_s)
            foretold_cells = (number(foretold.per_s), foretold.limit, number(measured), ratio)
            checks.append((arrangement, str(cpus), loops, f"{costs.threads_us:.0f}", *foretold_cells))
        if turns:
            capacities = [scaling.capacity(costs, cpus) for cpus in scaling.CPUS]
            cells = (f"{number(found.per_s)} ({_limit(found)})" for found in capacities)
            rows.append((arrangement, *cells))
    headings = ("loops, µs", "other threads, µs", "answers/s by the model", "its limit", "measured", "to the model")
    yield from _table(("", "CPUs", *headings), checks)
    yield "By the costs on the most CPUs above, without a generator; in parentheses, what is busy all of the time:"
    yield ""
    yield from _table(("answers/s", *(f"{cpus} CPUs" for cpus in scaling.CPUS)), rows)


def _limit(found: scaling.Capacity) -> str:
    where = "CPUs" if found.limit == "CPUs" else f"loop of {found.limit}"
    return f"{where}; {found.fronts} fronts" if found.fronts > 1 else where


def _tolerances(limits: Mapping[str, float]) -> str:
    return ", ".join(f"{limit:g} in {dtype}" for dtype, limit in limits.items())


def _realistic(section: _Section) -> Iterator[str]:
    rows = []
    for system in section.systems:
        model, _, name = system.rpartition(", ")
        ours = generation.of_model(model, FOUR)
        for callers in section.callers:
            ratio = section.ratio(ours, system, callers, throughput) if name != FOUR else None
            first = section.cells(system, callers, throughput, p50, figure("itl_p50_ms"))
            rows.append((system, str(callers), *first, _spread(ratio)))
    headings = ("", "callers", "tokens/s", "first token p50 ms", "between tokens, ms", f"{FOUR} to it")
    yield from _table(headings, rows)


_Lines: TypeAlias = Callable[[_Section], Iterator[str]]
# Title, text and tables of each section.
_SECTIONS: Mapping[str, tuple[str, str, _Lines]] = {
    overhead.SECTION: (
        "What everything but the model costs",
        "A fake model that takes no time, against a `grpc.aio` server that answers with what it gets, and the same "
        f"server on our transport (*{OUR_ECHO}*). One and the same client sends the same bytes to all and reads the "
        "answers afterwards. *CPU µs*, here and below, is the CPU time of all server processes a request, *client µs* "
        "that of the client, *client* its share of a CPU. *Refusing*: a server whose only place is taken; it ends "
        "every call with RESOURCE_EXHAUSTED. *Called by grpcio*: a check with a client that is not ours, and that "
        "takes more of the machine; its ratios are relative to the echo called by grpcio.",
        _overhead,
    ),
    LIKE_FOR_LIKE: (
        "Beside other systems, like for like",
        "LitServe, Ray Serve, infinity (as its engine) and Triton (its Python back end) with the OpenVINO graph, "
        "the dtype and the tokenizer in Rust of neuronpipe. The client that calls neuronpipe over gRPC calls them "
        "over HTTP or (Triton) gRPC. onnxruntime behind FastAPI, as people write it, has ONNX graphs of the same "
        "weights. Their answers are checked against neuronpipe's answers. Each was tried with several settings "
        "(below). The best with 32 callers and the best with one were then measured in turns with neuronpipe, "
        "during whose turns they are stopped (SIGSTOP). The columns to the right are neuronpipe's figure divided by"
        " the other system's figure, in the same rounds. Bold: the best of a dtype.",
        _like_for_like,
    ),
    models.SECTION: (
        "MiniLM classification",
        "MiniLM's body with a head of two labels made from a seed, English of up to 128 tokens, 33 on average. *Back "
        "end alone*: OpenVINO in one process with as many streams as CPUs, given tokenized texts sorted by length and "
        "cut into the best of several batch sizes: the ceiling. *Padding* is the part of the computed tokens that was "
        "padding. Other sections measured the same systems at other times, and the speed of a virtual CPU drifts: "
        "compare figures of one table only.",
        _models,
    ),
    against_peers.SECTION: (
        "Beside other systems, as people write them",
        "The same model on the same texts, in float32 on PyTorch, each server in a virtual environment of its own, as "
        "people would start it; `transformers` is a pipeline in the caller's process, one text at a time or batched. "
        "LitServe, Ray Serve and Triton were measured with both ways to use two CPUs; the better one counts, for each "
        "figure. The client that calls neuronpipe calls each. A peer's server is stopped (SIGSTOP) during the turns of "
        "neuronpipe, since some take CPU time when idle. The columns to the right are the throughput of `serve all` "
        "divided by the system's throughput, in the same rounds and with the same callers.",
        _peers,
    ),
    embedding_peers.SECTION: (
        "Embeddings beside other systems",
        "MiniLM as an embedder: all systems have the same weights, tokenizer and texts. The client that calls "
        "neuronpipe calls these servers: llama.cpp's own server, built for this CPU; infinity with its engine "
        "`optimum`, which is onnxruntime; onnxruntime behind FastAPI as people write it, each text alone. Libraries "
        "embed in their own process, batches of 32 texts for 32 callers and single texts for one: "
        "sentence-transformers with each of its back ends, fastembed, and candle (candding). int8: ONNX's dynamic "
        "quantization, llama.cpp's q8_0. Vectors are checked against neuronpipe's vectors: 1 - cosine is at most "
        f"{_tolerances(embedding_peers.TOLERANCES)}. Each server was tried with several settings (below). Peers are "
        "stopped (SIGSTOP) during the turns of neuronpipe. The columns to the right are neuronpipe's figure divided by "
        "the other system's figure, in the same rounds. Bold: the best of a dtype.",
        _embeddings,
    ),
    overload.SECTION: (
        "Overload",
        f"An open loop at 2 to 16 times what a closed loop of {overload.CALLERS} callers got from the same system just "
        f"before, with a deadline of {overload.DEADLINE_MS:g} ms; float32, turns twice as long as the others. *On one "
        "CPU*: the server has one CPU, the generator the others; else they share all. *Answered of computed*: answers "
        "within their deadline, of the sequences that the executor's log says it computed; *left*: of these, how many "
        "nobody waited for any more when they were done. *Refused*: calls that ended with an error before their "
        "deadline; the others were given up. *Lag*: how late the generator was. *Errors*: in the closed loops.",
        _overload,
    ),
    scaling.SECTION: (
        "Capacity on more CPUs",
        f"A model, by the CPU time of a request of MiniLM in {scaling.DTYPE} at {scaling.CALLERS} callers: the CPUs "
        "together are busy for no more than all of the time, and neither is an event loop, which uses one CPU. It is "
        "an upper bound: it leaves out waiting between threads, the interpreter's lock in worker threads, memory "
        "bandwidth and the network. The first table is its check on this machine; with one CPU for the servers the "
        "generator has the others, with two it takes its part of both, which the model counts. *Front processes*: "
        "`serve all --front-processes`, as many as help.",
        _scaling,
    ),
    telemetry.SECTION: (
        "Traces and metrics",
        "Nothing exported (metrics are counted all the same), traces of 1 % and of all requests, to a collector on the "
        "same machine that only keeps what it gets. *To off*: throughput to that of the same system without traces. "
        "*Covered*: the three stages' share of the request's span, median and least.",
        _telemetry,
    ),
    generation.SECTION: (
        "Generated texts",
        "Random weights, float32. *llama*: 6 layers of width 512, prompts of 64 tokens, 48 new ones, greedy. "
        "*bart*: 6 + 6 layers of width 512, texts of 256 tokens, 48 new ones, 4 beams. *transformers*: `generate` "
        "in a process of its own, with batches of as many prompts as callers; *engine alone*: the executor's engine "
        "in a process of its own; *openvino-genai*, *vllm*, *llama-cpp* (its server) and *ctranslate2* with such "
        "batches, stopped while it is not their turn. Four processes are called by "
        "`neuronpipe load --generate`, which reads every part; *with a schema*: texts that are JSON. Rates are "
        "new tokens a second; p50 to p99 are times to the first token, of bart to the whole text.",
        _generation,
    ),
    generation_realistic.SECTION: (
        "Generated texts of a model of realistic size",
        "Qwen 2.5 of 0.5 B parameters by configuration, with random weights: 24 layers of width 896, a vocabulary of "
        "151,936, prompts of 64 tokens, 48 new ones, greedy; weights in int8 and in bfloat16. *engine alone*: the "
        "executor's engine in a process of its own; *openvino-genai*: the graph of our bundle, with its properties; "
        "*llama-cpp*: llama.cpp's own server, built for this CPU, with weights in q8_0 and bfloat16. Both get batches "
        "of as many prompts as callers, and are stopped while it is not their turn. Each of their first tokens is "
        f"checked: its logit in float32 is at most {generation_realistic.MOST_BELOW:g} standard deviations below the "
        "largest one. Column to the right: new tokens/s of four processes to the system's in the same rounds.",
        _realistic,
    ),
}


def _starts(starts: Sequence[Start]) -> Iterator[str]:
    yield from ("## Start and memory", "")
    rows = []
    for service in SERVICES:
        turns = [start for start in starts if start.service == service]
        ready, memory = (
            _spread(Spread.of([getattr(start, name) for start in turns])) for name in ("ready_s", "memory_mb")
        )
        rows.append((service, ready, memory, "yes" if any(start.holds_torch for start in turns) else "no"))
    yield from _table(("", "start to ready, s", "memory, MB", "holds torch"), rows)


def _bold(system: str, *, is_bold: bool) -> str:
    return f"**{system}**" if is_bold else system


def _spread(spread: Spread | None, unit: str = "") -> str:
    if spread is None:
        return ""
    if spread.rounds == 1:
        return f"{number(spread.median)}{unit}"
    return f"{number(spread.median)}{unit} ({number(spread.low)} – {number(spread.high)})"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (*markdown_table(headings, rows), "")
