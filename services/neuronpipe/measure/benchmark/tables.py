"""The tables of a report, ours beside the published tables, in the same columns.

Published figures are for comparing: they come from other machines, and were never measured here.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.measure.benchmark.costs import Costs, cost_per_million, dollars
from neuronpipe.measure.benchmark.matrix import LATENCY, Variant
from neuronpipe.measure.benchmark.results import CellResult, ColdStart, Results
from neuronpipe.measure.figures import Table, number

_FILE = Path(__file__).with_name("published.json")


def published_tables() -> Mapping[str, Mapping[str, Any]]:
    """Returns tables as they were published, by name: `title`, `source`, `columns` and `rows`."""
    tables: Mapping[str, Mapping[str, Any]] = json.loads(_FILE.read_text())
    return tables


# The published g4dn.xlarge, by whether the batch is 1 or its best: throughput, and cost per million.
_G4DN = {True: (149.0, 0.98), False: (422.0, 0.35)}


def comparison_tables(results: Results, costs: Costs) -> Iterator[Table]:
    """Yields each of our tables before the published table that it compares with."""
    for name, published in published_tables().items():
        yield _TABLES[name](results, costs, published["columns"])
        note = f"Published, not measured here: {published['source']}."
        yield Table(f"Published: {published['title']}", note, published["columns"], published["rows"])


def cells_table(results: Results) -> Table:
    """Returns every cell, with the parts of its mean latency."""
    rows = []
    for result in results.measured:
        interval = result.p95_interval
        rates = (result.percentile_ms(99), result.throughput_per_s, result.tokens_per_s)
        parts = (result.preprocess_ms, result.predict_ms, result.postprocess_ms)
        rows.append(
            (
                *(*_named(result), number(result.percentile_ms(50))),
                f"{number(interval.value)} ({number(interval.low)} to {number(interval.high)})",
                *(*map(number, (*rates, *parts)), str(len(result.latency_ms))),
            )
        )
    return Table(
        "All cells",
        "Latency of a batch through pre-process, prediction and post-process in ms, the 95th percentile with its "
        "bootstrap interval of 95 %; then inputs and tokens a second, the three parts of the mean latency in ms, and "
        "how many batches were measured.",
        (
            *(*_NAMES, "p50", "p95", "p99", "Inputs/s", "Tokens/s"),
            *("Pre-process", "Prediction", "Post-process", "Calls"),
        ),
        rows,
    )


def missing_table(results: Results) -> Table:
    """Returns the cells without figures."""
    rows = [(*_named(result), result.reason) for result in results.cells if result.reason]
    return Table("Not measured", "Cells that the model or the back end did not take.", (*_NAMES, "Why"), rows)


def _core_grouping(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    price = costs.price
    most_cores = max((result.cell.variant.cores for result in results.measured), default=1)
    rows = []
    for result in results.at_base_length:
        cell, cores = result.cell, result.cell.variant.cores
        if cell.mode == LATENCY and cores > 1:
            continue
        throughput, cost = result.throughput_per_s, cost_per_million(price, result.throughput_per_s)
        reference, reference_cost = _G4DN[cell.batch == 1]
        rows.append(
            (
                f"{costs.machine}: {cell.variant.model}, {cell.variant.dtype}",
                str(cell.batch),
                "one model on all CPUs" if cores == 1 else "data parallel",
                f"1/{cores} of the CPUs" if cores > 1 else "all CPUs" if most_cores > 1 else "1",
                number(throughput),
                f"{result.percentile_ms(95) / 1e3:.4f}",
                dollars(cost),
                number(throughput / reference) if _is_bert(cell.variant) else "",
                f"{cost / reference_cost:.0%}" if cost is not None and _is_bert(cell.variant) else "",
            )
        )
    return Table(
        "Core grouping: replicas on parts of the CPUs, or one model on all",
        f"Measured here, length {results.base_length}. Ratios are to the published g4dn.xlarge with batch 1, "
        f"for larger batches with batch 64, and only of bert-base. {costs.source}",
        columns,
        rows,
    )


def _two_variants(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    """Returns pairs of a model's variants: the first variant, and each of its others with equal shapes."""
    rows = []
    for first, other in itertools.product(results.measured, repeat=2):
        base, cell = first.cell, other.cell
        if base.variant != _first_variant(results, base.variant.model) or cell.variant == base.variant:
            continue
        if replace(cell, variant=base.variant) != base or cell.variant.model != base.variant.model:
            continue
        rows.append(
            (
                f"{base.variant.model}: A {_short(base.variant)}, B {_short(cell.variant)}",
                *(str(base.batch), str(base.length or "image"), number(first.mean_ms), number(other.mean_ms)),
                f"{first.mean_ms / other.mean_ms:.2f}",
                *(number(result.throughput_per_s) for result in (first, other)),
                *(_per_inference(costs.price, result) for result in (first, other)),
            )
        )
    return Table(
        "Two variants side by side",
        "Measured here: the mean latency of two dtypes or back ends. For two machines, run on each and use `neuronpipe "
        f"benchmark compare`. {costs.source}",
        [name.replace("Inf1", "A").replace("Inf2", "B") for name in columns],
        rows,
    )


def _lengths(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    single = [result for result in results.measured if (result.cell.batch, result.cell.mode) == (1, LATENCY)]
    lengths = sorted({result.cell.length for result in results.measured if result.cell.length})
    rows = []
    for variant in dict.fromkeys(result.cell.variant for result in single):
        p95_ms = {
            result.cell.length: number(result.percentile_ms(95)) for result in single if result.cell.variant == variant
        }
        cells = (p95_ms.get(length, "") for length in (*lengths, 0))
        rows.append((variant.model, _short(variant), *cells))
    return Table(
        "Latency by length, batch 1: p95 in ms",
        "Measured here, with pre-process, prediction and post-process.",
        ("Model", "Variant", *map(str, lengths), "image"),
        rows,
    )


def _serverless(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    rows = []
    for start in results.cold_starts:
        if start.reason:
            rows.append((start.model, start.task.replace("_", " "), f"not measured: {start.reason}", *[""] * 6))
            continue
        memory = next((size for size in sorted(costs.prices.per_second) if size * 2**20 >= start.memory_bytes), 0)
        price = costs.prices.per_second.get(memory)
        total_ms = float(np.mean(start.model_ms) + np.mean(start.overhead_ms))
        start_ms = float(np.median(start.starts_ms))
        rows.append(
            (
                start.model,
                start.task.replace("_", " "),
                _size(start.size_bytes),
                f"{memory} MB" if memory else f"{start.memory_bytes / 2**20:.0f} MB: too much",
                _mean_and_p99(start.model_ms),
                _mean_and_p99(start.overhead_ms),
                _cold(start),
                dollars(None if price is None else price * total_ms / 1e3 * 1e6),
                dollars(None if price is None else price * start_ms / 1e3 * 1e6),
            )
        )
    return Table(
        "Serverless: cold starts, and single requests over loopback",
        f"Measured here with `serve all`: {results.base_length} tokens or one image; memory is the smallest size that "
        f"holds the process. Cost of a million requests by {costs.prices.serverless}'s price a second, of "
        f"{costs.prices.date}; the last column if each of them were a cold start, from files not in memory to the "
        "first answer. A platform's own overhead is not in it.",
        (*columns, "Cold start median (min to max)", "Cost per 1M", "Cost per 1M cold starts"),
        rows,
    )


def _best_throughput(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    rows = [
        (f"{model}, {_short(best.cell.variant)}", str(best.cell.batch), number(best.throughput_per_s))
        for model, best in results.best.items()
    ]
    return Table("Throughput with the best batch", f"Measured here, length {results.base_length}.", columns, rows)


def _single_latency(results: Results, costs: Costs, columns: Sequence[str]) -> Table:
    rows = [
        (
            f"{result.cell.variant.model}, {_short(result.cell.variant)}",
            number(result.percentile_ms(50)),
            number(result.percentile_ms(99)),
        )
        for result in results.at_base_length
        if result.cell.batch == 1 and result.cell.mode == LATENCY
    ]
    return Table("Latency with batch 1", f"Measured here, length {results.base_length}.", columns, rows)


_TABLES: Mapping[str, Callable[[Results, Costs, Sequence[str]], Table]] = {
    "core_grouping": _core_grouping,
    "two_machines": _two_variants,
    "lengths": _lengths,
    "serverless": _serverless,
    "best_throughput": _best_throughput,
    "single_latency": _single_latency,
}


def _is_bert(variant: Variant) -> bool:
    return variant.model == "bert-base-uncased"


def _first_variant(results: Results, model: str) -> Variant:
    return next(result.cell.variant for result in results.measured if result.cell.variant.model == model)


def _short(variant: Variant) -> str:
    return f"{variant.backend} {variant.dtype}, {variant.cores} core{'s' if variant.cores > 1 else ''}"


_NAMES = ("Model", "Back end", "dtype", "Cores", "Mode", "Batch", "Length")


def _named(result: CellResult) -> tuple[str, ...]:
    cell = result.cell
    variant = cell.variant
    head = (variant.model, variant.backend, variant.dtype, str(variant.cores), cell.mode)
    return (*head, str(cell.batch), str(cell.length or "image"))


def _per_inference(price: float | None, result: CellResult) -> str:
    return "price missing" if price is None else f"${price / 3600 / result.throughput_per_s:.7f}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def _mean_and_p99(values_ms: Sequence[float]) -> str:
    return f"{number(float(np.mean(values_ms)))} / {number(float(np.percentile(values_ms, 99)))} ms"


def _cold(start: ColdStart) -> str:
    median, low, high = (
        float(value) / 1e3 for value in (np.median(start.starts_ms), min(start.starts_ms), max(start.starts_ms))
    )
    return f"{median:.2f} s ({low:.2f} to {high:.2f})"
