"""The figures of a run, computed from every sample, and their report: progress lines, and a table at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.measure.figures import Distribution, distribution
from neuronpipe.measure.load.generator import NOT_SENT, OK, OUTCOMES, Rows, Tick
from neuronpipe.measure.load.request import GenerationLoad, LoadRequest

# Above these the generator itself distorts the measurement.
_MAX_CPU_SHARE = 0.9
_MAX_LAG_P99_MS = 10.0


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The figures of generated texts, as their callers saw them. None if there was nothing to measure.

    `output_tokens_per_s` and `inter_token_ms` count every part that arrived in the measured time.
    """

    output_tokens_per_s: float
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    cached_ratio: float | None
    first_token_ms: Distribution | None
    inter_token_ms: Distribution | None
    per_token_ms: Distribution | None
    longest_gap_ms: Distribution | None
    first_token_limit_ms: float | None
    token_limit_ms: float | None


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The figures of a run; docs/load.md defines each. None if there was nothing to measure.

    Rates count the answers of the measured time. All other figures are of the requests that were due in that time.
    `requests` is their number: answers and errors together, each request once.
    """

    target: str
    model: str
    version: str
    task: str
    concurrency: int | None
    rate_per_s: float | None
    deadline_ms: float | None
    priority: str | None
    processes: int
    seed: int
    warm_up_s: float
    measured_s: float
    is_broken_off: bool

    requests: int
    answers: int
    answers_in_time: int
    errors: dict[str, int]
    offered_per_s: float | None
    throughput_per_s: float
    goodput_per_s: float
    tokens_per_s: float

    latency_ms: Distribution | None
    stages_ms: dict[str, Distribution]
    batch_size_mean: float | None
    batch_sizes: dict[int, int]
    padding_ratio: float | None
    generation: GenerationResult | None

    send_lag_ms: Distribution | None
    cpu_shares: list[float]
    warnings: list[str]


def compute_result(
    request: LoadRequest,
    *,
    version: str,
    task: str,
    rows: Rows,
    parts: Rows,
    cpu_shares: Sequence[float],
    measured_s: float,
    is_broken_off: bool,
) -> LoadResult:
    """Computes the figures of all processes' rows and parts. `measured_s`: the measured time."""
    is_open = request.rate_per_s is not None
    is_ok = rows["outcome"] == OUTCOMES.index(OK)
    back_s = rows["due_s"] + rows["latency_s"]
    came = rows[is_ok & (back_s >= 0) & (back_s < measured_s)]
    is_measured = (rows["due_s"] >= 0) & (rows["due_s"] < measured_s)
    measured, answers = rows[is_measured], rows[is_measured & is_ok]
    padded_tokens = _sum(answers["padded_tokens"])
    # Requests that were never sent have no lag.
    lag_s = measured["lag_s"][measured["outcome"] != OUTCOMES.index(NOT_SENT)]
    send_lag_ms = distribution(lag_s * 1e3) if is_open else None
    stages_ms = {name: distribution(values) for name, values in _stages_ms(answers).items()}
    of_request = ("target", "model", "rate_per_s", "deadline_ms", "priority", "processes", "seed", "warm_up_s")
    return LoadResult(
        **{name: getattr(request, name) for name in of_request},
        version=version,
        task=task,
        concurrency=None if is_open else request.callers,
        measured_s=measured_s,
        is_broken_off=is_broken_off,
        requests=len(measured),
        answers=len(answers),
        answers_in_time=_sum(_is_in_time(answers, request)),
        errors={OUTCOMES[code]: count for code, count in _counts(measured["outcome"]).items() if OUTCOMES[code] != OK},
        offered_per_s=_per_s(len(measured), measured_s) if is_open else None,
        throughput_per_s=_per_s(len(came), measured_s),
        goodput_per_s=_per_s(_sum(_is_in_time(came, request)), measured_s),
        tokens_per_s=_per_s(_sum(came["tokens"]), measured_s),
        latency_ms=distribution(answers["latency_s"] * 1e3),
        stages_ms={name: found for name, found in stages_ms.items() if found},
        batch_size_mean=float(answers["batch_size"].mean()) if len(answers) else None,
        batch_sizes=_counts(answers["batch_size"]),
        padding_ratio=1 - _sum(answers["tokens"]) / padded_tokens if padded_tokens else None,
        generation=_generation_result(request.generation, answers, parts, measured_s) if request.generation else None,
        send_lag_ms=send_lag_ms,
        cpu_shares=list(cpu_shares),
        warnings=_warnings(cpu_shares, send_lag_ms),
    )


def _sum(values: NDArray[Any]) -> int:
    return int(values.sum(dtype=np.int64))


def _per_s(count: int, measured_s: float) -> float:
    return count / measured_s if measured_s > 0 else 0.0


def _is_in_time(answers: Rows, request: LoadRequest) -> NDArray[np.bool_]:
    """Returns whether each answer is within the deadline, and within the limits of generated texts."""
    load = request.generation
    limits_ms = {
        "latency_s": request.deadline_ms,
        "first_token_s": load.first_token_limit_ms if load else None,
        "token_s": load.token_limit_ms if load else None,
    }
    in_time = np.ones(len(answers), np.bool_)
    for name, limit_ms in limits_ms.items():
        if limit_ms is not None:
            in_time &= answers[name] * 1e3 <= limit_ms
    return in_time


def _generation_result(load: GenerationLoad, answers: Rows, parts: Rows, measured_s: float) -> GenerationResult:
    came = parts[(parts["back_s"] >= 0) & (parts["back_s"] < measured_s)]
    several = answers[answers["token_s"] > 0]  # texts that came in several parts
    prompt_tokens = _sum(answers["tokens"])
    return GenerationResult(
        output_tokens_per_s=_per_s(_sum(came["tokens"]), measured_s),
        prompt_tokens=distribution(answers["tokens"]),
        output_tokens=distribution(answers["output_tokens"]),
        cached_ratio=_sum(answers["cached_tokens"]) / prompt_tokens if prompt_tokens else None,
        first_token_ms=distribution(answers["first_token_s"] * 1e3),
        inter_token_ms=distribution(came["gap_s"][~np.isnan(came["gap_s"])] * 1e3),
        per_token_ms=distribution(several["token_s"] * 1e3),
        longest_gap_ms=distribution(several["longest_gap_s"] * 1e3),
        first_token_limit_ms=load.first_token_limit_ms,
        token_limit_ms=load.token_limit_ms,
    )


def _stages_ms(answers: Rows) -> dict[str, NDArray[np.floating]]:
    """Returns the parts of each answer's latency, which sum to it."""
    stages = {name: answers[f"{name}_ms"] for name in ("preprocess", "queue", "compute", "postprocess")}
    stages["gateway_and_hops"] = answers["total_ms"] - sum(stages.values())
    stages["outside"] = answers["latency_s"] * 1e3 - answers["total_ms"]
    return stages


def _counts(values: NDArray[np.integer]) -> dict[int, int]:
    uniques, counts = np.unique(values, return_counts=True)
    return dict(zip(uniques.tolist(), counts.tolist(), strict=True))


def _warnings(cpu_shares: Sequence[float], send_lag_ms: Distribution | None) -> list[str]:
    """Returns warnings if the generator itself was the bottleneck."""
    warnings = [
        f"generator process {number} of {len(cpu_shares)} used {share:.2f} of a CPU core (limit {_MAX_CPU_SHARE}): "
        "it measures itself; give it --processes, or less to do"
        for number, share in enumerate(cpu_shares, 1)
        if share > _MAX_CPU_SHARE
    ]
    if send_lag_ms and send_lag_ms.p99 > _MAX_LAG_P99_MS:
        warnings.append(
            f"requests were sent late: by {send_lag_ms.p99:.1f} ms at the 99th percentile (limit "
            f"{_MAX_LAG_P99_MS:g} ms): "
            "the generator is short of CPU, and its lag is part of the latencies"
        )
    return warnings


_STAGES = {
    "preprocess": "pre-process",
    "queue": "predict: queue",
    "compute": "predict: compute",
    "postprocess": "post-process",
    "gateway_and_hops": "gateway and hops",
    "outside": "outside the gateway",
}
_BAR_WIDTH = 40
_PERCENTILES = ("p50", "p90", "p95", "p99", "max", "mean")
_HEAD = f"{'ms':22}" + "".join(f"{name:>9}" for name in _PERCENTILES)


def progress_line(request: LoadRequest, ticks: Sequence[Tick]) -> str:
    """Returns the progress line of one second, over all processes."""
    second = ticks[0].second
    latencies_ms = [latency for tick in ticks for latency in tick.latencies_ms]
    errors, in_flight = sum(tick.errors for tick in ticks), sum(tick.in_flight for tick in ticks)
    measuring = "" if second <= request.warm_up_s + request.duration_s else "waiting"
    phase = "warm-up" if second <= request.warm_up_s else measuring
    p50 = f"{np.percentile(latencies_ms, 50):.2f} ms" if latencies_ms else "-"
    return (
        f"{second:5} s {len(latencies_ms):7} requests/s {errors:6} errors   p50 {p50:>10} {in_flight:6} in "
        f"flight   {phase}"
    ).rstrip()


def table(result: LoadResult) -> str:
    sections = (_title, _rates, _errors, _latencies, _generation, _batches, _generator)
    return "\n\n".join("\n".join(lines) for section in sections if (lines := section(result)))


def _title(result: LoadResult) -> list[str]:
    load = f"{result.concurrency} callers in turn"
    if result.rate_per_s is not None:
        load = f"{result.rate_per_s:g} requests/s at random times"
    deadline = "" if result.deadline_ms is None else f", deadline {result.deadline_ms:g} ms"
    priority = "" if result.priority is None else f", priority {result.priority}"
    system = f"{result.model} version {result.version} ({result.task.replace('_', '-')}) at {result.target}"
    measured = f"measured for {result.measured_s:.1f} s after {result.warm_up_s:g} s of warm-up"
    limits = _limits(result.generation) if result.generation else []
    broken_off = ", broken off" if result.is_broken_off else ""
    return [f"{system}: {load}{deadline}{priority}", *limits, f"{measured}{broken_off}"]


def _limits(generation: GenerationResult) -> list[str]:
    limits = {"first token": generation.first_token_limit_ms, "time per token": generation.token_limit_ms}
    words = [f"{name} within {limit_ms:g} ms" for name, limit_ms in limits.items() if limit_ms is not None]
    return [f"goodput counts answers with the {' and the '.join(words)}"] if words else []


def _rates(result: LoadResult) -> list[str]:
    rates = {"offered": result.offered_per_s, "throughput": result.throughput_per_s, "goodput": result.goodput_per_s}
    lines = [f"{name:12} {rate:10.1f} requests/s" for name, rate in rates.items() if rate is not None]
    tokens = {"tokens": result.tokens_per_s}
    if result.generation:
        tokens = {"prompts": result.tokens_per_s, "new tokens": result.generation.output_tokens_per_s}
    return [*lines, *(f"{name:12} {rate:10.0f} tokens/s" for name, rate in tokens.items())]


def _errors(result: LoadResult) -> list[str]:
    head = f"{'requests':12} {result.requests:8}   answered {result.answers}, errors {sum(result.errors.values())}"
    counts = sorted(result.errors.items())
    return [head, *(f"  {outcome:20} {count:8} ({count / result.requests:.1%})" for outcome, count in counts)]


def _latencies(result: LoadResult) -> list[str]:
    if result.latency_ms is None:
        return ["no request was answered"]
    stages = {f"  {_STAGES[name]}": figures for name, figures in result.stages_ms.items()}
    return [_HEAD, *(f"{name:22}{_row(figures)}" for name, figures in {"latency": result.latency_ms, **stages}.items())]


def _generation(result: LoadResult) -> list[str]:
    generation = result.generation
    if generation is None or generation.output_tokens is None or generation.prompt_tokens is None:
        return []
    rows = {
        "first token (TTFT)": generation.first_token_ms,
        "between parts (ITL)": generation.inter_token_ms,
        "per token (TPOT)": generation.per_token_ms,
        "longest gap": generation.longest_gap_ms,
        "prompt, tokens": generation.prompt_tokens,
        "text, tokens": generation.output_tokens,
    }
    lines = [f"{name:22}{_row(figures)}" for name, figures in rows.items() if figures]
    return [_HEAD, *lines, f"{'prompts from cache':22}{100 * (generation.cached_ratio or 0):8.1f} %"]


def _row(figures: Distribution) -> str:
    return "".join(f"{getattr(figures, name):9.2f}" for name in _PERCENTILES)


def _batches(result: LoadResult) -> list[str]:
    # Generated texts are in no batch of their own.
    if not result.batch_size_mean:
        return []
    padding = "not told" if result.padding_ratio is None else f"{result.padding_ratio:.1%} of what was computed"
    largest_count = max(result.batch_sizes.values())
    bars = [
        f"  {size:4} {count / result.answers:6.1%} {'#' * round(_BAR_WIDTH * count / largest_count)}".rstrip()
        for size, count in result.batch_sizes.items()
    ]
    return [f"padding      {padding}", f"batch size   {result.batch_size_mean:.2f} on average over answers", *bars]


def _generator(result: LoadResult) -> list[str]:
    cpu = ", ".join(f"{share:.2f}" for share in result.cpu_shares)
    lag = result.send_lag_ms
    late = f"; sent late by {lag.p50:.2f} ms (p50), {lag.p99:.2f} ms (p99)" if lag else ""
    return [f"generator    {cpu} of a CPU core{late}", *(f"WARNING: {warning}" for warning in result.warnings)]
