"""The metrics of several processes as the metrics of one service: each process writes its metrics, which are added."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from neuronpipe.core.metrics import Counter, Exemplar, Family, Gauge, Histogram
from neuronpipe.core.names import Instrument, instruments
from neuronpipe.core.tracing import SpanContext

# Families in a form that JSON can hold.
Written: TypeAlias = Sequence[Any]
_Series: TypeAlias = Counter | Histogram | Gauge


def write_families(families: Iterable[Family]) -> Written:
    """Writes recorded metrics as numbers. Gauges are read now."""
    return [
        (family.instrument.name, [(labels, _write(series)) for labels, series in family.series.items()])
        for family in families
    ]


def read_families(written: Written) -> list[Family]:
    """Reads families that `write_families` has written."""
    instruments_by_name = {instrument.name: instrument for instrument in instruments()}
    return [
        Family(
            instruments_by_name[name],
            {tuple(labels): _read(instruments_by_name[name], series) for labels, series in family_series},
        )
        for name, family_series in written
    ]


def add_families(sources: Iterable[Iterable[Family]]) -> list[Family]:
    """Returns the sum of several processes.

    Gauges in the units 1 and s are shares, states and times, so their lowest value replaces the sum.
    """
    totals: dict[str, Family] = {}
    for family in chain.from_iterable(sources):
        sums = totals.setdefault(family.instrument.name, Family(family.instrument, {})).series
        for labels, series in family.series.items():
            sums[labels] = _add(family.instrument, sums[labels], series) if labels in sums else series
    return list(totals.values())


class FrontMetrics:
    """The metrics of all front processes, also of ended processes, so that sums never decrease.

    The event loop writes them and exporters' threads read them, so each change is one assignment.
    """

    def __init__(self) -> None:
        # The sums of ended processes, and the families of running processes by their numbers.
        self._families: tuple[list[Family], Mapping[int, list[Family]]] = ([], {})

    def update(self, number: int, written: Written) -> None:
        """Replaces the metrics that a front process has recorded so far."""
        ended, running = self._families
        self._families = ended, {**running, number: read_families(written)}

    def end(self, number: int) -> None:
        """Keeps the counters and histograms of an ended front process, because another process takes its number."""
        ended, running = self._families
        last = [family for family in running.get(number, ()) if family.instrument.kind != "gauge"]
        others = {other: families for other, families in running.items() if other != number}
        self._families = add_families([ended, last]), others

    def add_to(self, families: Iterable[Family]) -> Iterable[Family]:
        """Returns the sums of the families of all front processes and of this process."""
        ended, running = self._families
        return add_families([families, ended, *running.values()])


def _write(series: _Series) -> Any:
    if isinstance(series, Histogram):
        exemplars = [
            (bucket, exemplar.value, exemplar.context.traceparent, exemplar.context.tracestate, exemplar.at_ns)
            for bucket, exemplar in dict(series.exemplars).items()
        ]
        return (list(series.counts), series.total, exemplars)
    return series.value if isinstance(series, Counter) else float(series())


def _read(instrument: Instrument, written: Any) -> _Series:
    if instrument.kind == "gauge":
        return partial(float, written)
    if instrument.kind == "counter":
        counter = Counter()
        counter.add(written)
        return counter
    histogram = Histogram(instrument.bounds)
    histogram.counts, histogram.total, exemplars = written
    for bucket, value, traceparent, tracestate, at_ns in exemplars:
        if context := SpanContext.parse(traceparent, tracestate):
            histogram.exemplars[bucket] = Exemplar(value, context, at_ns)
    return histogram


def _add(instrument: Instrument, first: _Series, second: _Series) -> _Series:
    if isinstance(first, Counter) and isinstance(second, Counter):
        counter = Counter()
        counter.add(first.value + second.value)
        return counter
    if isinstance(first, Histogram) and isinstance(second, Histogram):
        histogram = Histogram(first.bounds)
        histogram.counts = [mine + theirs for mine, theirs in zip(first.counts, second.counts, strict=True)]
        histogram.total = first.total + second.total
        newest_last = sorted([*first.exemplars.items(), *second.exemplars.items()], key=lambda item: item[1].at_ns)
        histogram.exemplars = dict(newest_last)
        return histogram
    assert callable(first) and callable(second)  # noqa: S101, PT018
    numbers = (float(first()), float(second()))
    return partial(float, min(numbers) if instrument.unit in ("1", "s") else sum(numbers))
