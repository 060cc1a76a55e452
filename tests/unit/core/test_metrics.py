"""core/metrics.py: numbers that exporters read."""

import pytest

from neuronpipe.core.metrics import Counter, Histogram, Meters
from neuronpipe.core.names import Attributes, Instrument
from neuronpipe.core.tracing import SpanContext

_DURATION = Instrument("test.duration", "histogram", "s", "a duration", (Attributes.MODEL,), (10, 20))
_COUNT = Instrument("test.count", "counter", "{x}", "a count")


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((10, 20))
    for value in (9, 10, 11, 20, 21):
        histogram.record(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 71


def test_a_bucket_keeps_the_last_sampled_request_as_its_exemplar() -> None:
    histogram, first, last = Histogram((10,)), SpanContext.new(is_sampled=True), SpanContext.new(is_sampled=True)
    histogram.record(3, first)
    histogram.record(4, last)
    histogram.record(5)
    assert [(bucket, kept.value, kept.context) for bucket, kept in histogram.exemplars.items()] == [(0, 4, last)]


def test_the_same_labels_are_the_same_series() -> None:
    meters = Meters()
    assert meters.histogram(_DURATION, "a") is meters.histogram(_DURATION, "a")
    assert meters.histogram(_DURATION, "a") is not meters.histogram(_DURATION, "b")
    assert meters.counter(_COUNT) is meters.counter(_COUNT)


def test_labels_that_an_instrument_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"test\.duration has the labels neuronpipe\.model\.name"):
        Meters().histogram(_DURATION)


def test_durations_are_exported_in_seconds() -> None:
    meters, counter = Meters(), Counter()
    counter.add(2_500_000_000)
    meters.histogram(_DURATION, "a")
    meters.counter(_COUNT)
    duration, count = meters.families()
    assert duration.number(counter) == 2.5
    assert count.number(counter) == 2_500_000_000
