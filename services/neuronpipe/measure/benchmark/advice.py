"""The cheapest way to meet a latency at a rate, by prices of instances from a dated file that users replace."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.results import CellResult, Results

DEFAULT_PRICES = Path(__file__).with_name("prices.json")
ON_DEMAND, SPOT = "on-demand", "spot"


@dataclass(frozen=True, slots=True)
class Instance:
    """A type of instance. Prices in USD an hour; None where the file has none."""

    name: str
    cpus: int
    per_hour: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Prices:
    """The file. `per_second`: of a serverless endpoint, by its memory in MB."""

    date: str
    note: str
    instances: Mapping[str, Instance]
    serverless: str
    per_second: Mapping[int, float]

    def alike(self, cpus: int, chosen: str) -> list[Instance]:
        """The chosen type; without one, those with as many CPUs. Others would have other figures."""
        if chosen:
            return [self.instances[chosen]] if chosen in self.instances else [Instance(chosen, cpus, {})]
        return [one for one in self.instances.values() if one.cpus == cpus]


def cost_per_million(per_hour: float | None, throughput_per_s: float) -> float | None:
    """USD; None without a price."""
    return None if per_hour is None else per_hour / 3600 / throughput_per_s * 1e6


def dollars(price: float | None) -> str:
    """For people: with cents, as the published tables have them, and of less than ten cents two digits."""
    if price is None:
        return "price missing"
    return f"${price:,.2f}" if price >= 0.1 else f"${price:.2g}" if price >= 0.001 else f"${price:.1e}"


def read_prices(path: Path = DEFAULT_PRICES) -> Prices:
    """Raises SetupError, which names what is wrong in the file."""
    try:
        content = json.loads(path.read_text())
        instances = {name: _instance(name, one) for name, one in content["instances"].items()}
        serverless = content["serverless"]
        return Prices(
            date=str(content["date"]),
            note=str(content.get("note", "")),
            instances=instances,
            serverless=str(serverless["name"]),
            per_second={int(memory): float(price) for memory, price in serverless["per_second_by_memory_mb"].items()},
        )
    except OSError as error:
        raise SetupError(f"--prices {path}: {error.strerror}") from error
    except KeyError as error:
        raise SetupError(f"--prices {path}: lacks {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise SetupError(f"--prices {path}: is no file of prices: {error}") from error


def _instance(name: str, content: Any) -> Instance:
    prices = {ON_DEMAND: content.get("on_demand_per_hour"), SPOT: content.get("spot_per_hour")}
    for kind, price in prices.items():
        if price is not None and not 0 < float(price) < float("inf"):
            raise ValueError(f"{name}: the {kind} price is {price}")
    return Instance(name, int(content["cpus"]), prices)


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
