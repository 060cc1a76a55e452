"""The report of a run: progress lines, and a table at the end."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.measure.load.figures import Distribution, GenerationResult, LoadResult
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import Tick

_STAGES = {
    "preprocess": "pre-process",
    "queue": "predict: queue",
    "compute": "predict: compute",
    "postprocess": "post-process",
    "gateway_and_hops": "gateway and hops",
    "outside": "outside the gateway",
}
_BAR_WIDTH = 40
_HEAD = f"{'ms':22}" + "".join(f"{name:>9}" for name in ("p50", "p90", "p95", "p99", "max", "mean"))


def progress_line(request: LoadRequest, ticks: Sequence[Tick]) -> str:
    """The progress line of one second, over all processes."""
    second = ticks[0].second
    latencies_ms = [latency for tick in ticks for latency in tick.latencies_ms]
    errors, in_flight = sum(tick.errors for tick in ticks), sum(tick.in_flight for tick in ticks)
    phase = (
        "warm-up"
        if second <= request.warm_up_s
        else ""
        if second <= request.warm_up_s + request.duration_s
        else "waiting"
    )
    p50 = f"{np.percentile(latencies_ms, 50):.2f} ms" if latencies_ms else "-"
    return (
        f"{second:5} s {len(latencies_ms):7} requests/s {errors:6} errors   p50 {p50:>10} {in_flight:6} in "
        f"flight   {phase}"
    ).rstrip()


def table(result: LoadResult) -> str:
    """The table of all figures."""
    sections = (
        _title(result),
        _rates(result),
        _errors(result),
        _latencies(result),
        _generation(result),
        _batches(result),
        _generator(result),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _title(result: LoadResult) -> list[str]:
    load = (
        f"{result.concurrency} callers in turn"
        if result.rate_per_s is None
        else f"{result.rate_per_s:g} requests/s at random times"
    )
    deadline = [] if result.deadline_ms is None else [f"deadline {result.deadline_ms:g} ms"]
    priority = [] if result.priority is None else [f"priority {result.priority}"]
    title = (
        f"{result.model} version {result.version} ({result.task}) at {result.target}: "
        f"{', '.join([load, *deadline, *priority])}"
    )
    measured = f"measured for {result.measured_s:.1f} s after {result.warm_up_s:g} s of warm-up"
    limits = _limits(result.generation) if result.generation else []
    return [title, *limits, measured + (", broken off" if result.is_broken_off else "")]


def _limits(found: GenerationResult) -> list[str]:
    limits = {"first token": found.first_token_limit_ms, "time per token": found.token_limit_ms}
    words = [f"{name} within {limit_ms:g} ms" for name, limit_ms in limits.items() if limit_ms is not None]
    return [f"goodput counts answers with the {' and the '.join(words)}"] if words else []


def _rates(result: LoadResult) -> list[str]:
    rates = {
        "offered": result.offered_per_s,
        "throughput": result.throughput_per_s,
        "goodput": result.goodput_per_s,
    }
    lines = [f"{name:12} {rate:10.1f} requests/s" for name, rate in rates.items() if rate is not None]
    tokens = {"tokens": result.tokens_per_s}
    if result.generation:
        tokens = {"prompts": result.tokens_per_s, "new tokens": result.generation.output_tokens_per_s}
    return [*lines, *(f"{name:12} {rate:10.0f} tokens/s" for name, rate in tokens.items())]


def _errors(result: LoadResult) -> list[str]:
    head = f"{'requests':12} {result.requests:8}   answered {result.answers}, errors {sum(result.errors.values())}"
    return [
        head,
        *(
            f"  {outcome:20} {count:8} ({count / result.requests:.1%})"
            for outcome, count in sorted(result.errors.items())
        ),
    ]


def _latencies(result: LoadResult) -> list[str]:
    if result.latency_ms is None:
        return ["no request was answered"]
    rows = {"latency": result.latency_ms} | {f"  {_STAGES[name]}": found for name, found in result.stages_ms.items()}
    return [_HEAD, *(f"{name:22}{_row(found)}" for name, found in rows.items())]


def _generation(result: LoadResult) -> list[str]:
    found = result.generation
    if found is None or found.output_tokens is None or found.prompt_tokens is None:
        return []
    rows = {
        "first token (TTFT)": found.first_token_ms,
        "between parts (ITL)": found.inter_token_ms,
        "per token (TPOT)": found.per_token_ms,
        "longest gap": found.longest_gap_ms,
        "prompt, tokens": found.prompt_tokens,
        "text, tokens": found.output_tokens,
    }
    lines = [f"{name:22}{_row(one)}" for name, one in rows.items() if one]
    return [_HEAD, *lines, f"{'prompts from cache':22}{100 * (found.cached_ratio or 0):8.1f} %"]


def _row(found: Distribution) -> str:
    return "".join(f"{value:9.2f}" for value in (found.p50, found.p90, found.p95, found.p99, found.max, found.mean))


def _batches(result: LoadResult) -> list[str]:
    # Texts that are generated are in no batch of their own.
    if not result.batch_size_mean:
        return []
    padding = "not told" if result.padding_ratio is None else f"{result.padding_ratio:.1%} of what was computed"
    most = max(result.batch_sizes.values())
    bars = [
        f"  {size:4} {count / result.answers:6.1%} {'#' * round(_BAR_WIDTH * count / most)}".rstrip()
        for size, count in result.batch_sizes.items()
    ]
    return [f"padding      {padding}", f"batch size   {result.batch_size_mean:.2f} on average over answers", *bars]


def _generator(result: LoadResult) -> list[str]:
    cpu = ", ".join(f"{share:.2f}" for share in result.cpu_shares)
    lag = result.send_lag_ms
    late = f"; sent late by {lag.p50:.2f} ms (p50), {lag.p99:.2f} ms (p99)" if lag else ""
    return [f"generator    {cpu} of a CPU core{late}", *(f"WARNING: {warning}" for warning in result.warnings)]
