"""The cost of inferences, and the cheapest way to reach a latency at a rate.

Prices of instances are in a dated file that users replace.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.results import CellResult, Results
from neuronpipe.measure.figures import Table, number

DEFAULT_PRICES = Path(__file__).with_name("prices.json")
ON_DEMAND, SPOT = "on-demand", "spot"
THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True)
class Instance:
    """A type of instance. Prices in USD per hour; None where the file has none."""

    name: str
    cpus: int
    per_hour: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Prices:
    """The content of the price file."""

    date: str
    note: str
    instances: Mapping[str, Instance]

    def alike(self, cpus: int, chosen: str) -> list[Instance]:
        """Returns the chosen type; without a choice, the types with this number of CPUs, because others would have
        other figures.

        If the file has no such type, returns a type without a price.
        """
        alike = (instance for instance in self.instances.values() if instance.cpus == cpus)
        named = (instance for instance in self.instances.values() if instance.name == chosen)
        return list(named if chosen else alike) or [Instance(chosen or THIS_MACHINE, cpus, {})]


def cost_per_million(per_hour: float | None, throughput_per_s: float) -> float | None:
    """Returns the cost of a million inferences in USD; None without a price."""
    return None if per_hour is None else per_hour / 3600 / throughput_per_s * 1e6


def dollars(price: float | None) -> str:
    """Formats a price for people: with cents, as in the published tables; below ten cents with two digits."""
    if price is None:
        return "price missing"
    return f"${price:,.2f}" if price >= 0.1 else f"${price:.2g}" if price >= 0.001 else f"${price:.1e}"


def read_prices(path: Path = DEFAULT_PRICES) -> Prices:
    """Reads a file of prices. Raises SetupError, which names the fault in the file."""
    try:
        content = json.loads(path.read_text())
        instances = {name: _instance(name, content) for name, content in content["instances"].items()}
        return Prices(date=str(content["date"]), note=str(content.get("note", "")), instances=instances)
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


@dataclass(frozen=True, slots=True)
class Costs:
    """The basis of a report's costs: the types of instances that are like this machine, or the type that was named.

    `machine`: the name of the measured machine in rows.
    """

    prices: Prices
    instances: Sequence[Instance]
    machine: str = THIS_MACHINE

    @property
    def price(self) -> float | None:
        """The price of an hour on demand, for tables with one column of cost."""
        return self.instances[0].per_hour.get(ON_DEMAND)

    @property
    def source(self) -> str:
        """The source of the price, for the notes of these tables."""
        return f"Costs are at the on-demand price of {self.instances[0].name}, of {self.prices.date}."


def costs_table(results: Results, costs: Costs) -> Table:
    """Returns a row for each model: its best cell, and the cost of a million inputs with it."""
    rows = []
    for model, best in results.best.items():
        head = (model, str(best.cell.batch), best.cell.variant.dtype, number(best.throughput_per_s))
        for instance in costs.instances:
            prices = (instance.per_hour.get(kind) for kind in (ON_DEMAND, SPOT))
            paid = (dollars(cost_per_million(price, best.throughput_per_s)) for price in prices)
            rows.append((*head, instance.name, *paid))
    return Table(
        "Cost per million inferences",
        f"The throughput of the best cell of {results.base_length} tokens, measured on this machine, at the price of "
        "instances with as many CPUs. A price is that of its instance, the throughput that of this machine: name yours "
        f"with --instance. Prices of {costs.prices.date}: {costs.prices.note}",
        ("Model", "Batch", "dtype", "Inputs/s", "Instance", "On-demand per 1M", "Spot per 1M"),
        rows,
    )


# Usable share of a replica's throughput, measured with callers who wait; callers at random times queue beyond it.
UTILIZATION = 0.7


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of `--p95-ms` and `--rate`. Raises SetupError if a value is out of range."""

    p95_ms: float
    rate_per_s: float

    def __post_init__(self) -> None:
        for option, value in (("--p95-ms", self.p95_ms), ("--rate", self.rate_per_s)):
            if not 0 < value < float("inf"):
                raise SetupError(f"{option} {value:g}: must be more than 0")


@dataclass(frozen=True, slots=True)
class Advice:
    """A configuration that meets the goal. `per_hour`: USD for all replicas, `per_million`: USD for a million inputs
    at the rate; None without a price.
    """

    result: CellResult
    instance: str
    replicas: int
    per_hour: float | None
    per_million: float | None


def advise(results: Results, goal: Goal, instances: Sequence[Instance]) -> dict[str, Advice | str]:
    """Returns each model's cheapest configuration for inputs of the base length, or the reason why there is none."""
    advice: dict[str, Advice | str] = {}
    for model in results.models:
        cells = [result for result in results.at_base_length if result.cell.variant.model == model]
        fitting = [result for result in cells if result.percentile_ms(95) <= goal.p95_ms]
        if fitting:
            choices = (_advice(result, goal, instance) for result in fitting for instance in instances)
            advice[model] = min(choices, key=_order)
        elif cells:
            best = min(cells, key=lambda result: result.percentile_ms(95))
            advice[model] = f"the lowest p95 is {best.percentile_ms(95):.3g} ms, with {best.cell.name}"
        else:
            advice[model] = "nothing of it was measured"
    return advice


def _advice(result: CellResult, goal: Goal, instance: Instance) -> Advice:
    replicas = max(1, math.ceil(goal.rate_per_s / (result.throughput_per_s * UTILIZATION)))
    price = instance.per_hour.get(ON_DEMAND)
    total = None if price is None else price * replicas
    return Advice(result, instance.name, replicas, total, cost_per_million(total, goal.rate_per_s))


def _order(advice: Advice) -> tuple[float, int, float]:
    """Returns the order of configurations: by price (no price last), by number of replicas, by latency."""
    price = float("inf") if advice.per_hour is None else advice.per_hour
    return price, advice.replicas, advice.result.percentile_ms(95)


_GOAL_COLUMNS = (
    *("Model", "Instance", "Replicas", "Batch", "Length", "dtype", "Cores", "p95 ms"),
    *("Per hour", "Per 1M at the rate", "Why none"),
)


def goal_table(results: Results, costs: Costs, goal: Goal) -> Table:
    """Returns a row of advice for each model."""
    rows = []
    for model, advice in advise(results, goal, costs.instances).items():
        if isinstance(advice, str):
            rows.append((model, "none", *[""] * 8, advice))
            continue
        cell = advice.result.cell
        shape = (str(cell.batch), str(cell.length or "image"), cell.variant.dtype, str(cell.variant.cores))
        prices = (dollars(advice.per_hour), dollars(advice.per_million))
        p95_ms = f"{advice.result.percentile_ms(95):.3g}"
        rows.append((model, advice.instance, str(advice.replicas), *shape, p95_ms, *prices, ""))
    return Table(
        f"The cheapest way to {goal.rate_per_s:g} inputs of {results.base_length} tokens a second with p95 of at "
        f"most {goal.p95_ms:g} ms",
        f"Replicas at {UTILIZATION:.0%} of their measured throughput, so that those who come at random times seldom "
        "queue. A batch above 1 needs callers who send as many at once.",
        _GOAL_COLUMNS,
        rows,
    )
