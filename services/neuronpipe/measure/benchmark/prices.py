"""Prices of instances, from a dated file that users replace by theirs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError

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
