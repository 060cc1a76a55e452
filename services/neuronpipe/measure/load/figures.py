"""The figures of a run, computed from every sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuronpipe.measure.load.generation import GenerationLoad
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import NOT_SENT, OK, OUTCOMES, Rows

# Above these the generator itself distorts what it measures.
_MAX_CPU_SHARE = 0.9
_MAX_LAG_P99_MS = 10.0


@dataclass(frozen=True)
class Distribution:
    """Percentiles by linear interpolation, the mean and the largest of some values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """The figures of generated texts, as their callers saw them. None if there was nothing to measure.

    `output_tokens_per_s` and `inter_token_ms` are of all parts that came in the measured time.
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
    """The figures of a run; docs/load.md says what each means. None if there was nothing to measure.

    Rates count what came back in the measured time. All other figures are of the requests that were due in that time.
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
    """The figures of all processes' rows and parts; `measured_s` is how long was measured."""
    is_open = request.rate_per_s is not None
    is_ok = rows["outcome"] == OUTCOMES.index(OK)
    back_s = rows["due_s"] + rows["latency_s"]
    came_in_time = rows[is_ok & (back_s >= 0) & (back_s < measured_s)]
    measured = (rows["due_s"] >= 0) & (rows["due_s"] < measured_s)
    answers = rows[measured & is_ok]
    padded_tokens = int(answers["padded_tokens"].sum(dtype=np.int64))
    # Requests that were never sent have no lag.
    send_lag_ms = (
        distribution(rows[measured & (rows["outcome"] != OUTCOMES.index(NOT_SENT))]["lag_s"] * 1e3) if is_open else None
    )
    return LoadResult(
        target=request.target,
        model=request.model,
        version=version,
        task=task,
        concurrency=None if is_open else request.callers,
        rate_per_s=request.rate_per_s,
        deadline_ms=request.deadline_ms,
        priority=request.priority,
        processes=request.processes,
        seed=request.seed,
        warm_up_s=request.warm_up_s,
        measured_s=measured_s,
        is_broken_off=is_broken_off,
        requests=int(measured.sum()),
        answers=len(answers),
        answers_in_time=int(_is_in_time(answers, request).sum()),
        errors=_errors(rows[measured]),
        offered_per_s=_per_s(int(measured.sum()), measured_s) if is_open else None,
        throughput_per_s=_per_s(len(came_in_time), measured_s),
        goodput_per_s=_per_s(int(_is_in_time(came_in_time, request).sum()), measured_s),
        tokens_per_s=_per_s(int(came_in_time["tokens"].sum(dtype=np.int64)), measured_s),
        latency_ms=distribution(answers["latency_s"] * 1e3),
        stages_ms={name: found for name, values in _stages_ms(answers).items() if (found := distribution(values))},
        batch_size_mean=float(answers["batch_size"].mean()) if len(answers) else None,
        batch_sizes=_counts(answers["batch_size"]),
        padding_ratio=1 - int(answers["tokens"].sum(dtype=np.int64)) / padded_tokens if padded_tokens else None,
        generation=_generation(request.generation, answers, parts, measured_s) if request.generation else None,
        send_lag_ms=send_lag_ms,
        cpu_shares=list(cpu_shares),
        warnings=_warnings(cpu_shares, send_lag_ms),
    )


def distribution(values: NDArray[np.floating | np.integer]) -> Distribution | None:
    """The distribution of some values; None without values."""
    if not len(values):
        return None
    exact = values.astype(np.float64)
    p50, p90, p95, p99 = np.percentile(exact, (50, 90, 95, 99)).tolist()
    return Distribution(mean=float(exact.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(exact.max()))


def _per_s(count: int, measured_s: float) -> float:
    return count / measured_s if measured_s > 0 else 0.0


def _is_in_time(answers: Rows, request: LoadRequest) -> NDArray[np.bool_]:
    """Whether each answer is within the deadline, and within the limits of generated texts."""
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


def _generation(load: GenerationLoad, answers: Rows, parts: Rows, measured_s: float) -> GenerationResult:
    came = parts[(parts["back_s"] >= 0) & (parts["back_s"] < measured_s)]
    several = answers[answers["token_s"] > 0]  # texts that did not come as a whole
    prompt_tokens = int(answers["tokens"].sum(dtype=np.int64))
    return GenerationResult(
        output_tokens_per_s=_per_s(int(came["tokens"].sum(dtype=np.int64)), measured_s),
        prompt_tokens=distribution(answers["tokens"]),
        output_tokens=distribution(answers["output_tokens"]),
        cached_ratio=int(answers["cached_tokens"].sum(dtype=np.int64)) / prompt_tokens if prompt_tokens else None,
        first_token_ms=distribution(answers["first_token_s"] * 1e3),
        inter_token_ms=distribution(came["gap_s"][~np.isnan(came["gap_s"])] * 1e3),
        per_token_ms=distribution(several["token_s"] * 1e3),
        longest_gap_ms=distribution(several["longest_gap_s"] * 1e3),
        first_token_limit_ms=load.first_token_limit_ms,
        token_limit_ms=load.token_limit_ms,
    )


def _stages_ms(answers: Rows) -> dict[str, NDArray[np.floating]]:
    """The parts of each answer's latency; they sum to it."""
    stages = {name: answers[f"{name}_ms"] for name in ("preprocess", "queue", "compute", "postprocess")}
    stages["gateway_and_hops"] = answers["total_ms"] - sum(stages.values())
    stages["outside"] = answers["latency_s"] * 1e3 - answers["total_ms"]
    return stages


def _counts(values: NDArray[np.integer]) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _errors(rows: Rows) -> dict[str, int]:
    return {OUTCOMES[code]: count for code, count in _counts(rows["outcome"]).items() if OUTCOMES[code] != OK}


def _warnings(cpu_shares: Sequence[float], send_lag_ms: Distribution | None) -> list[str]:
    """Warnings if the generator itself was the bottleneck."""
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
