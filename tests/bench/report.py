"""A run as JSON, with every round, and as a page."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neuronpipe.measure.figures import markdown_table
from tests.bench import against_peers, generation, like_for_like, models, overhead, overload, telemetry
from tests.bench.generation_peers import GENERATION_PEERS
from tests.bench.measurements import Measurement, Measurements, Spread, figure, latency, p50, throughput
from tests.bench.models import CEILING, of_dtype
from tests.bench.startup import SERVICES, Start
from tests.bench.systems import ALL, DTYPES, FOUR, OUR_ECHO
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
    parts = {*measured, like_for_like.SECTION, like_for_like.TRIALS} if models.SECTION in measured else set(measured)
    run.sections |= {name: how for name, how in content.get("sections", {}).items() if name not in measured}
    run.measurements += [Measurement(**one) for one in content["measurements"] if one["section"] not in parts]
    if "start" not in measured:
        run.starts += [Start(**one) for one in content["starts"]]
    for name, reason in content["unavailable"].items():
        section = generation.SECTION if name in GENERATION_PEERS else against_peers.SECTION
        if name.startswith(like_for_like.SECTION):
            section = like_for_like.SECTION
        if section not in parts:
            run.unavailable[name] = reason


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
    yield "# Benchmark"
    yield ""
    yield f"Written by `{run.command}` (`make bench`); every round is in [results.json](results.json). Do not edit."
    yield ""
    yield (
        "In each round every system has a turn: a ratio is of two turns in the same round, so that a machine which "
        "drifts does not decide it. Figures are medians over the rounds, then the smallest and the largest. Generators "
        "ran on the same machine."
    )
    yield ""
    yield from _table(("machine", ""), [(name, value) for name, value in run.machine.items()])
    yield from _table(("section", "measured"), list(run.sections.items()))
    yield "## Targets"
    yield ""
    yield from _table(("", "target", "measured", ""), [_target_row(target) for target in targets])
    for section, lines in _SECTIONS.items():
        if found.systems(section):
            yield from lines(found)
    if run.unavailable:
        yield "## Peers that could not be measured"
        yield ""
        for peer, reason in run.unavailable.items():
            yield f"- {peer}: `{' '.join(reason.split())[-400:].replace('`', '')}`"
        yield ""
    if run.starts:
        yield from _starts(run.starts)


def _target_row(target: Target) -> tuple[str, ...]:
    limit = f"{'≥' if target.is_at_least else '≤'} {_number(target.limit)}{target.unit}"
    said = {True: "met", False: "**missed**", None: "not measured"}[target.is_met]
    return target.name, limit, _spread(target.measured, target.unit), said


def _overhead(found: Measurements) -> Iterator[str]:
    section = overhead.SECTION
    yield "## What everything but the model costs"
    yield ""
    yield (
        "A fake model that takes no time, against a `grpc.aio` server that answers with what it gets, and the same "
        f"server on our transport (*{OUR_ECHO}*). One and the same client sends the same bytes to all and reads the "
        "answers afterwards. *CPU µs*, here and below, is the CPU time of all server processes a request, *client µs* "
        "that of the client, *client* its share of a CPU. *Refusing*: a server whose only place is taken; it ends "
        "every call with RESOURCE_EXHAUSTED. *Called by grpcio*: a check with a client that is not ours, and that "
        "takes more of the machine; its ratios are to the echo called by grpcio."
    )
    yield ""
    rows = []
    for system in found.systems(section):
        for callers in found.callers(section):
            if not found.of(section, system, callers):
                continue
            reference = overhead.reference_of(system)
            ratios = (
                _spread(found.ratio(section, system, reference, callers, value)) if system != reference else ""
                for value in (throughput, _SERVER_CPU, p50)
            )
            client = (
                found.spread(section, system, callers, figure(name)) for name in ("generator_cpu_us", "generator_cpu")
            )
            cells = _loop_cells(found, section, system, callers)
            rows.append(
                (system, str(callers), *cells, *(_number(one.median) if one else "" for one in client), *ratios)
            )
    rows.sort(key=lambda row: int(row[1]))
    headings = ("client µs", "client", "of echo", "CPU to echo's", "p50 to echo's")
    yield from _table((*_LOOP_HEADINGS, *headings), rows)
    yield "Where one caller's request spends its time, as the gateway sees it (p50 in ms, hops and queues included):"
    yield ""
    parts = ("total", "preprocess", "predict", "postprocess")
    rows = []
    for system in (ALL, FOUR):
        rows.append((system, *(_spread(found.spread(section, system, 1, figure(f"{part}_p50_ms"))) for part in parts)))
    yield from _table(("", *parts), rows)


def _models(found: Measurements) -> Iterator[str]:
    section = models.SECTION
    yield "## MiniLM classification"
    yield ""
    yield (
        "MiniLM's body with a head of two labels made from a seed, English of 6 to 128 tokens, 33 on average. *Back "
        "end alone*: OpenVINO "
        "in one process with as many streams as CPUs, given tokenized texts sorted by length and cut into the best of "
        "several batch "
        "sizes: the ceiling. *Padding* is the part of the computed tokens that was padding."
    )
    yield ""
    rows: list[tuple[str, ...]] = []
    for dtype in DTYPES:
        ceiling = of_dtype(CEILING, dtype)
        turns = found.of(section, ceiling, 0)
        batch = f"{turns[0].figures['batch_tokens']:.0f} tokens" if turns else ""
        rows.append((ceiling, "", _spread(found.spread(section, ceiling, 0, throughput)), *[""] * 6, batch, ""))
        for callers in models.CALLERS:
            for system in (of_dtype(ALL, dtype), of_dtype(FOUR, dtype)):
                ratio = found.ratio(section, system, ceiling, callers, throughput, reference_callers=0)
                padding = found.spread(section, system, callers, figure("padding", 100))
                batch_size = found.spread(section, system, callers, figure("batch_size"))
                cells = _loop_cells(found, section, system, callers)
                rows.append((system, str(callers), *cells, _spread(padding), _spread(batch_size), _spread(ratio)))
    yield from _table((*_LOOP_HEADINGS, "padding %", "batch", "of ceiling"), rows)


def _like_for_like(found: Measurements) -> Iterator[str]:
    section = like_for_like.SECTION
    yield "## Beside other systems, like for like"
    yield ""
    yield (
        "LitServe, Ray Serve, infinity and Triton (its Python back end) with what ours have: the same OpenVINO graph "
        "in the same dtype, the same tokenizer in Rust, and the client that calls ours, over HTTP or (Triton) gRPC. "
        "Their answers are checked against ours. Each was tried with several settings (below); the best with 32 "
        "callers and the best with one were then measured in turns with ours, during which they are stopped (SIGSTOP). "
        "The columns to "
        "the right are ours to the system's in the same rounds. Bold: the best of a dtype."
    )
    yield ""
    rows = []
    for dtype in DTYPES:
        systems = [system for system in found.systems(section) if system.endswith(f", {dtype}")]
        ours = [of_dtype(system, dtype) for system in (ALL, FOUR)]
        for callers in like_for_like.CALLERS:
            value, is_high = (throughput, True) if callers > 1 else (p50, False)
            best = best_peer(found, callers, value, is_high=is_high, section=section, dtype=dtype)
            # Ours first, then each peer's.
            for system in sorted(systems, key=lambda system: system not in ours):
                if not found.of(section, system, callers):
                    continue
                ratios = (
                    _spread(found.ratio(section, mine, system, callers, one)) if system not in ours else ""
                    for one in (throughput, p50)
                    for mine in ours
                )
                name = f"**{system}**" if system == best else system
                rows.append((name, str(callers), *_loop_cells(found, section, system, callers), *ratios))
    ratios = (f"{what}, {system}" for what in ("answers/s", "p50") for system in (ALL, FOUR))
    yield from _table((*_LOOP_HEADINGS, *ratios), rows)
    yield "The settings that were tried, one turn each:"
    yield ""
    trials = like_for_like.TRIALS
    rows = [
        (
            system,
            *(
                _spread(found.spread(trials, system, callers, value))
                for callers, value in zip(reversed(like_for_like.CALLERS), (throughput, p50), strict=True)
            ),
        )
        for system in found.systems(trials)
    ]
    yield from _table(("", "answers/s, 32 callers", "p50 ms, 1 caller"), rows)


def _peers(found: Measurements) -> Iterator[str]:
    section = against_peers.SECTION
    ours = [of_dtype(ALL, dtype) for dtype in DTYPES]
    yield "## Beside other systems, as people write them"
    yield ""
    yield (
        "The same model on the same texts, in float32 on PyTorch, each server in a virtual environment of its own, as "
        "people would start "
        "it; `transformers` is a pipeline in the caller's process, one text at a time or batched. LitServe, Ray Serve "
        "and Triton were "
        "measured with both ways to use two CPUs; the better one counts, for each figure. Each is called by a client "
        "of its own protocol, "
        "which reads the answer before it sends the next text; ours reads its answers afterwards. A peer's server is "
        "stopped (SIGSTOP) "
        "during our turns, since some take CPU time when idle. The columns to the right are `serve all`'s to the "
        "system's in the same "
        "rounds: throughput at the same callers."
    )
    yield ""
    best = {(best_peer(found, callers, throughput, is_high=True), callers) for callers in found.callers(section)}
    rows = []
    for callers in found.callers(section):
        for system in found.systems(section):
            ratios = [
                found.ratio(section, mine, system, callers, throughput) if system not in ours else None for mine in ours
            ]
            name = f"**{system}**" if (system, callers) in best else system
            rows.append((name, str(callers), *_loop_cells(found, section, system, callers), *map(_spread, ratios)))
    yield from _table((*_LOOP_HEADINGS, *DTYPES), rows)


def _overload(found: Measurements) -> Iterator[str]:
    section = overload.SECTION
    yield "## Overload"
    yield ""
    yield (
        f"An open loop at 2 to 16 times what a closed loop of {overload.CALLERS} callers got from the same system just "
        f"before, with a deadline of {overload.DEADLINE_MS:g} ms; float32, turns twice as long as the others. *On one "
        "CPU*: the server has one CPU, the generator the others; else they share all. *Answered of computed*: answers "
        "within their deadline, of the sequences that the executor's log says it computed; *left*: of these, how many "
        "nobody waited for any more when they were done. *Refused*: calls that ended with an error before their "
        "deadline; the others were given up. *Lag*: how late the generator was. *Errors*: in the closed loops."
    )
    yield ""
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
    rows = []
    for system in found.systems(section):
        cells = (_spread(found.spread(section, system, overload.CALLERS, value)) for value in columns.values())
        errors = sum(one.errors for one in found.of(section, system, overload.CALLERS))
        rows.append((system, *cells, str(errors)))
    yield from _table(("", *columns, "errors"), rows)


def _telemetry(found: Measurements) -> Iterator[str]:
    section = telemetry.SECTION
    yield "## Traces and metrics"
    yield ""
    yield (
        "Nothing exported (metrics are counted all the same), traces of 1 % and of all requests, to a collector on the "
        "same machine that "
        "only keeps what it gets. *To off*: throughput to that of the same system without traces. *Covered*: the three "
        "stages' share of "
        "the request's span, median and least."
    )
    yield ""
    rows = []
    for system in found.systems(section):
        if system.startswith(telemetry.LOST):
            continue
        reference = f"{system.rpartition(', ')[0]}, {telemetry.OFF}"
        for callers in (telemetry.CALLERS, *telemetry.COVERAGE_CALLERS):
            if found.of(section, system, callers):
                ratio = found.ratio(section, system, reference, callers, throughput)
                covered = (
                    found.spread(section, system, callers, figure(name, 100)) for name in ("covered", "covered_least")
                )
                rows.append(
                    (
                        system,
                        str(callers),
                        *_loop_cells(found, section, system, callers),
                        _spread(ratio),
                        *map(_spread, covered),
                    )
                )
    headings = (*_LOOP_HEADINGS, "to off", "covered %", "least covered %")
    yield from _table(headings, rows)
    lost = [system for system in found.systems(section) if system.startswith(telemetry.LOST)]
    cells = ("requests", "complete_traces", "spans")
    rows = [
        (system, *(_spread(found.spread(section, system, telemetry.CALLERS, figure(cell))) for cell in cells))
        for system in lost
    ]
    yield from _table(("", "requests", "complete traces", "spans, batches included"), rows)


def _generation(found: Measurements) -> Iterator[str]:
    section = generation.SECTION
    yield "## Generated texts"
    yield ""
    yield (
        "Random weights, float32. *llama*: 6 layers of width 512, prompts of 64 tokens, 48 new ones, greedy. "
        "*bart*: 6 + 6 layers of width 512, texts of 256 tokens, 48 new ones, 4 beams. *transformers*: `generate` "
        "in a process of its own, with batches of as many prompts as callers; *engine alone*: the executor's engine "
        "in a process of its own; *openvino-genai*, *vllm*, *llama-cpp* (its server) and *ctranslate2* in environments "
        "of their own, with such batches, stopped while it is not their turn. Four processes are called by "
        "`neuronpipe load --generate`, which reads every part; *with a schema*: texts that are JSON. Rates are "
        "new tokens a second; p50 to p99 are times to the first token, of bart to the whole text."
    )
    yield ""
    rows = []
    for system in found.systems(section):
        if system in (generation.LONG_PROMPTS, generation.OVERLOAD):
            continue
        for callers in found.callers(section):
            if found.of(section, system, callers):
                itl = found.spread(section, system, callers, figure("itl_p50_ms"))
                rows.append((system, str(callers), *_loop_cells(found, section, system, callers), _spread(itl)))
    yield from _table((*_LOOP_HEADINGS[:2], "tokens/s", *_LOOP_HEADINGS[3:], "between tokens, ms"), rows)
    long, callers = generation.LONG_PROMPTS, generation.GAP_CALLERS
    yield f"{callers} texts, while a prompt of 2,000 tokens comes every other second; times between tokens in ms:"
    yield ""
    names = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "longest_to_median")
    cells = [_spread(found.spread(section, long, callers, figure(name))) for name in names]
    yield from _table(("median", "p99", "longest", "longest to median"), [cells])
    overload, callers = generation.OVERLOAD, generation.LLAMA_CALLERS[-1]
    yield (
        f"Overload: an open loop at {generation.FACTOR:g} times what {callers} callers get. Goodput counts texts with "
        f"the first token within {generation.FIRST_TOKEN_LIMIT_MS:g} ms and {generation.TOKEN_LIMIT_MS:g} ms a token; "
        "the deadline of each is what these allow for the whole text. The executor refuses prompts that would wait "
        f"{generation.MAX_PROMPT_WAIT_S:g} s for their first step (`--max-prompt-wait-s`)."
    )
    yield ""
    values = (figure("capacity_per_s"), figure("offered_per_s"), throughput, figure("goodput_of_capacity", 100))
    cells = [_spread(found.spread(section, overload, callers, value)) for value in (*values, p50)]
    yield from _table(("capacity/s", "offered/s", "goodput/s", "of capacity %", "first token p50 ms"), [cells])


_SECTIONS = {
    overhead.SECTION: _overhead,
    like_for_like.SECTION: _like_for_like,
    models.SECTION: _models,
    against_peers.SECTION: _peers,
    overload.SECTION: _overload,
    telemetry.SECTION: _telemetry,
    generation.SECTION: _generation,
}


def _starts(starts: Sequence[Start]) -> Iterator[str]:
    yield "## Start and memory"
    yield ""
    rows = []
    for service in SERVICES:
        turns = [one for one in starts if one.service == service]
        ready, memory = (_spread(Spread.of([getattr(one, name) for one in turns])) for name in ("ready_s", "memory_mb"))
        rows.append((service, ready, memory, "yes" if any(one.holds_torch for one in turns) else "no"))
    yield from _table(("", "start to ready, s", "memory, MB", "holds torch"), rows)


_LOOP_HEADINGS = ("", "callers", "answers/s", "p50 ms", "p90 ms", "p99 ms", "errors", "CPU µs")
_SERVER_CPU = figure("server_cpu_us")


def _loop_cells(found: Measurements, section: str, system: str, callers: int) -> tuple[str, ...]:
    turns = found.of(section, system, callers)
    rate, median_ms = found.spread(section, system, callers, throughput), found.spread(section, system, callers, p50)
    tails = (found.spread(section, system, callers, latency(name)) for name in ("p90", "p99"))
    return (
        _spread(rate),
        _spread(median_ms),
        *(_number(tail.median) if tail else "" for tail in tails),
        str(sum(one.errors for one in turns)),
        _spread(found.spread(section, system, callers, _SERVER_CPU)),
    )


def _spread(spread: Spread | None, unit: str = "") -> str:
    if spread is None:
        return ""
    if spread.rounds == 1:
        return f"{_number(spread.median)}{unit}"
    return f"{_number(spread.median)}{unit} ({_number(spread.low)} – {_number(spread.high)})"


def _number(value: float) -> str:
    """Three figures that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (*markdown_table(headings, rows), "")
