"""The cheapest way to meet a latency at a rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.prices import ON_DEMAND, Instance, cost_per_million, dollars
from neuronpipe.measure.benchmark.results import CellResult, Results

# Of a replica's throughput. The figures are of callers who wait; those who come at random times queue beyond this.
UTILIZATION = 0.7


@dataclass(frozen=True, slots=True)
class Advice:
    """A configuration that meets the goal. USD: of all replicas an hour, and of a million at the rate; None without a
    price.
    """

    result: CellResult
    instance: str
    replicas: int
    per_hour: float | None
    per_million: float | None


def advise(
    results: Results, p95_ms: float, rate_per_s: float, instances: Sequence[Instance]
) -> dict[str, Advice | str]:
    """For each model the cheapest configuration for inputs of the base length, or why there is none.

    Raises SetupError for a goal that is out of range.
    """
    for option, value in (("--p95-ms", p95_ms), ("--rate", rate_per_s)):
        if not 0 < value < float("inf"):
            raise SetupError(f"{option} {value:g}: must be more than 0")
    found: dict[str, Advice | str] = {}
    for model in results.models:
        cells = [one for one in results.at_base_length if one.cell.variant.model == model]
        fitting = [one for one in cells if one.percentile_ms(95) <= p95_ms]
        if fitting:
            found[model] = min(_choices(fitting, rate_per_s, instances), key=_order)
        elif cells:
            best = min(cells, key=lambda one: one.percentile_ms(95))
            found[model] = f"the lowest p95 is {best.percentile_ms(95):.3g} ms, with {best.cell.name}"
        else:
            found[model] = "nothing of it was measured"
    return found


def _choices(cells: Sequence[CellResult], rate_per_s: float, instances: Sequence[Instance]) -> list[Advice]:
    choices = []
    for one in cells:
        replicas = max(1, math.ceil(rate_per_s / (one.throughput_per_s * UTILIZATION)))
        for instance in instances or [Instance("this machine", 0, {})]:
            price = instance.per_hour.get(ON_DEMAND)
            total = None if price is None else price * replicas
            choices.append(Advice(one, instance.name, replicas, total, cost_per_million(total, rate_per_s)))
    return choices


def _order(advice: Advice) -> tuple[float, int, float]:
    """The cheapest, then the fewest replicas, then the lowest latency; without a price last."""
    price = float("inf") if advice.per_hour is None else advice.per_hour
    return price, advice.replicas, advice.result.percentile_ms(95)


def advice_rows(found: dict[str, Advice | str]) -> list[Sequence[str]]:
    """A table, its heading first."""
    rows: list[Sequence[str]] = [
        (
            "Model",
            "Instance",
            "Replicas",
            "Batch",
            "Length",
            "dtype",
            "Cores",
            "p95 ms",
            "Per hour",
            "Per 1M at the rate",
            "Why none",
        )
    ]
    for model, advice in found.items():
        if isinstance(advice, str):
            rows.append((model, "none", *[""] * 8, advice))
            continue
        cell = advice.result.cell
        rows.append(
            (
                model,
                advice.instance,
                str(advice.replicas),
                str(cell.batch),
                str(cell.length or "image"),
                cell.variant.dtype,
                str(cell.variant.cores),
                f"{advice.result.percentile_ms(95):.3g}",
                dollars(advice.per_hour),
                dollars(advice.per_million),
                "",
            )
        )
    return rows
