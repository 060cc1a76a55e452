"""The tables of a report, in the columns in which such figures are usually published."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from neuronpipe.measure.benchmark.costs import Costs, cost_per_million, dollars
from neuronpipe.measure.benchmark.matrix import LATENCY, Variant
from neuronpipe.measure.benchmark.results import CellResult, Results
from neuronpipe.measure.figures import Table, number


def figure_tables(results: Results, costs: Costs) -> Iterator[Table]:
    """Yields the tables in which such figures are usually published."""
    yield _core_grouping(results, costs)
    yield _two_variants(results, costs)
    yield _lengths(results)
    yield _best_throughput(results)
    yield _single_latency(results)


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


def _core_grouping(results: Results, costs: Costs) -> Table:
    price = costs.price
    most_cores = max((result.cell.variant.cores for result in results.measured), default=1)
    rows = []
    for result in results.at_base_length:
        cell, cores = result.cell, result.cell.variant.cores
        if cell.mode == LATENCY and cores > 1:
            continue
        throughput, cost = result.throughput_per_s, cost_per_million(price, result.throughput_per_s)
        rows.append(
            (
                f"{costs.machine}: {cell.variant.model}, {cell.variant.dtype}",
                str(cell.batch),
                "one model on all CPUs" if cores == 1 else "data parallel",
                f"1/{cores} of the CPUs" if cores > 1 else "all CPUs" if most_cores > 1 else "1",
                number(throughput),
                f"{result.percentile_ms(95) / 1e3:.4f}",
                dollars(cost),
            )
        )
    return Table(
        "Core grouping: replicas on parts of the CPUs, or one model on all",
        f"Length {results.base_length}. {costs.source}",
        (
            *("Instance", "Batch", "Mode", "Cores per model", "Throughput [sentences/s]", "p95 latency [s]"),
            "Cost per 1M",
        ),
        rows,
    )


def _two_variants(results: Results, costs: Costs) -> Table:
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
        "The mean latency of two dtypes or back ends. For two machines, run on each and use `neuronpipe "
        f"benchmark compare`. {costs.source}",
        (
            *("Model", "Batch", "Length", "A ms", "B ms", "×", "A inf/s", "B inf/s"),
            *("A cost/inference", "B cost/inference"),
        ),
        rows,
    )


def _lengths(results: Results) -> Table:
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
        "With pre-process, prediction and post-process.",
        ("Model", "Variant", *map(str, lengths), "image"),
        rows,
    )


def _best_throughput(results: Results) -> Table:
    rows = [
        (f"{model}, {_short(best.cell.variant)}", str(best.cell.batch), number(best.throughput_per_s))
        for model, best in results.best.items()
    ]
    return Table(
        "Throughput with the best batch", f"Length {results.base_length}.", ("Model", "Batch", "Throughput [1/s]"), rows
    )


def _single_latency(results: Results) -> Table:
    rows = [
        (
            f"{result.cell.variant.model}, {_short(result.cell.variant)}",
            number(result.percentile_ms(50)),
            number(result.percentile_ms(99)),
        )
        for result in results.at_base_length
        if result.cell.batch == 1 and result.cell.mode == LATENCY
    ]
    return Table("Latency with batch 1", f"Length {results.base_length}.", ("Model", "p50 ms", "p99 ms"), rows)


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
