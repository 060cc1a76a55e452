"""A telemetry that keeps its spans, for tests."""

from neuronpipe.core.metrics import Counter, Histogram, Meters, Telemetry
from neuronpipe.core.names import Instrument
from neuronpipe.core.tracing import Span, Tracer


class Recorded(Telemetry):
    """Samples a share of the requests whose caller did not decide otherwise: all of them, unless told."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.spans: list[Span] = []
        super().__init__(Tracer([self.spans.append], ratio=ratio), Meters())

    def named(self, name: str) -> list[Span]:
        """The spans of a name, in the order in which they ended."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        """The only span of a name."""
        (span,) = self.named(name)
        return span

    def counts(self, instrument: Instrument) -> dict[tuple[str, ...], float]:
        """What was counted, by the labels' values; of a histogram, how often. Without what never happened."""
        found: dict[tuple[str, ...], float] = {}
        for family in self.meters.families():
            if family.instrument == instrument:
                for labels, series in family.series.items():
                    if isinstance(series, Histogram):
                        found[labels] = sum(series.counts)
                    elif isinstance(series, Counter):
                        found[labels] = series.value
        return {labels: count for labels, count in found.items() if count}
