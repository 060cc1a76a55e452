"""The metrics of several processes as those of one service: written by each of them, and added up."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from neuronpipe.core.metrics import Counter, Exemplar, Family, Gauge, Histogram
from neuronpipe.core.names import Instrument, instruments
from neuronpipe.core.tracing import SpanContext

# As JSON can hold it.
Written: TypeAlias = Sequence[Any]
_Series: TypeAlias = Counter | Histogram | Gauge


def write_families(families: Iterable[Family]) -> Written:
    """What was recorded, as numbers; gauges are read now."""
    return [
        (family.instrument.name, [(labels, _write(series)) for labels, series in family.series.items()])
        for family in families
    ]


def read_families(written: Written) -> list[Family]:
    """What write_families has written."""
    known = {instrument.name: instrument for instrument in instruments()}
    return [
        Family(known[name], {tuple(labels): _read(known[name], series) for labels, series in found})
        for name, found in written
    ]


def add_families(sources: Iterable[Iterable[Family]]) -> list[Family]:
    """The sum of several processes. Of gauges in the units 1 and s, which are shares, states and times, the
    lowest instead.
    """
    found: dict[str, Family] = {}
    for family in chain.from_iterable(sources):
        sums = found.setdefault(family.instrument.name, Family(family.instrument, {})).series
        for labels, series in family.series.items():
            sums[labels] = _add(family.instrument, sums[labels], series) if labels in sums else series
    return list(found.values())


class FrontMetrics:
    """What front processes have recorded, those that have ended included: sums never go back.

    Written by the event loop and read by the threads of exporters, hence one assignment for each change.
    """

    def __init__(self) -> None:
        # Of processes that have ended, and of the others by their numbers.
        self._found: tuple[list[Family], Mapping[int, list[Family]]] = ([], {})

    def update(self, number: int, written: Written) -> None:
        """Replaces what a front process has recorded so far."""
        ended, running = self._found
        self._found = ended, {**running, number: read_families(written)}

    def end(self, number: int) -> None:
        """Keeps the counters and histograms of a front process for the service, as another takes its number."""
        ended, running = self._found
        last = [family for family in running.get(number, ()) if family.instrument.kind != "gauge"]
        others = {other: families for other, families in running.items() if other != number}
        self._found = add_families([ended, last]), others

    def add_to(self, own: Iterable[Family]) -> Iterable[Family]:
        """The sum of all front processes and of this one's own."""
        ended, running = self._found
        return add_families([own, ended, *running.values()])


def _write(series: _Series) -> Any:
    if isinstance(series, Histogram):
        exemplars = [
            (bucket, one.value, one.context.traceparent, one.context.tracestate, one.at_ns)
            for bucket, one in dict(series.exemplars).items()
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


def _add(instrument: Instrument, one: _Series, other: _Series) -> _Series:
    if isinstance(one, Counter) and isinstance(other, Counter):
        counter = Counter()
        counter.add(one.value + other.value)
        return counter
    if isinstance(one, Histogram) and isinstance(other, Histogram):
        histogram = Histogram(one.bounds)
        histogram.counts = [mine + theirs for mine, theirs in zip(one.counts, other.counts, strict=True)]
        histogram.total = one.total + other.total
        newest_last = sorted([*one.exemplars.items(), *other.exemplars.items()], key=lambda item: item[1].at_ns)
        histogram.exemplars = dict(newest_last)
        return histogram
    assert callable(one) and callable(other)  # noqa: S101, PT018
    numbers = (float(one()), float(other()))
    return partial(float, min(numbers) if instrument.unit in ("1", "s") else sum(numbers))
