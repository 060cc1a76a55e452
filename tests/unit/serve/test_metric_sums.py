"""serve/metric_sums.py: the numbers of several processes are those of one service."""

import json
from collections.abc import Iterable

import pytest

from neuronpipe.core.metrics import Counter, Family, Histogram, Labels, Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.tracing import SpanContext
from neuronpipe.serve.metric_sums import FrontMetrics, Written, read_families, write_families

_MODEL = ("minilm", "1")


def _recorded(requests: int, in_flight: float = 0, is_redis_there: float = 1) -> Meters:
    """A process that answered so many requests of two tokens in a millisecond each."""
    meters = Meters()
    for _ in range(requests):
        meters.counter(Metrics.REQUEST_TOKENS, *_MODEL).add(2)
        meters.histogram(Metrics.REQUEST_DURATION, *_MODEL, "OK").record(1_000_000)
    meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: in_flight)
    meters.gauge(Metrics.CACHE_REDIS, lambda: is_redis_there, "tokens")
    return meters


def _written(meters: Meters) -> Written:
    """As it travels between processes."""
    written: Written = json.loads(json.dumps(write_families(meters.families())))
    return written


def _numbers(families: Iterable[Family]) -> dict[tuple[str, Labels], object]:
    return {
        (family.instrument.name, labels): (list(series.counts), series.total)
        if isinstance(series, Histogram)
        else series.value
        if isinstance(series, Counter)
        else series()
        for family in families
        for labels, series in family.series.items()
    }


def test_what_is_read_is_what_was_written() -> None:
    meters = _recorded(3, in_flight=2)
    assert _numbers(read_families(_written(meters))) == _numbers(meters.families())


def test_exemplars_travel_with_their_histograms() -> None:
    context = SpanContext(0xAB, 0xCD, True, "vendor=1")
    meters = Meters()
    meters.histogram(Metrics.REQUEST_DURATION, *_MODEL, "OK").record(1_000_000, context)
    (family,) = read_families(_written(meters))
    (series,) = family.series.values()
    assert isinstance(series, Histogram)
    (exemplar,) = series.exemplars.values()
    assert (exemplar.value, exemplar.context) == (1_000_000, context)


def test_counters_and_histograms_add_up_and_gauges_by_their_kind() -> None:
    fronts = FrontMetrics()
    fronts.update(1, _written(_recorded(3, in_flight=2)))
    fronts.update(2, _written(_recorded(4, in_flight=5, is_redis_there=0)))
    own = Meters()
    own.counter(Metrics.BATCH_TOKENS, *_MODEL).add(100)
    own.counter(Metrics.REQUEST_TOKENS, *_MODEL).add(1)
    found = _numbers(fronts.add_to(own.families()))
    # A millisecond is the upper bound of the fourth bucket: 0.1, 0.25, 0.5, 1 ms.
    counts = [0, 0, 0, 7] + [0] * 13
    assert found == {
        (Metrics.BATCH_TOKENS.name, _MODEL): 100,
        (Metrics.REQUEST_TOKENS.name, _MODEL): 1 + 3 * 2 + 4 * 2,
        (Metrics.REQUEST_DURATION.name, (*_MODEL, "OK")): (counts, 7_000_000),
        (Metrics.REQUESTS_IN_FLIGHT.name, ()): 7,
        (Metrics.CACHE_REDIS.name, ("tokens",)): 0,
    }


def test_each_process_is_counted_once_however_often_it_reports() -> None:
    fronts = FrontMetrics()
    for requests in (1, 2, 5):
        fronts.update(1, _written(_recorded(requests)))
    assert _numbers(fronts.add_to([]))[Metrics.REQUEST_TOKENS.name, _MODEL] == 10


def test_what_a_process_did_before_it_died_stays_and_what_it_held_does_not() -> None:
    fronts = FrontMetrics()
    fronts.update(1, _written(_recorded(3, in_flight=2)))
    fronts.end(1)
    found = _numbers(fronts.add_to([]))
    assert found[Metrics.REQUEST_TOKENS.name, _MODEL] == 6
    assert (Metrics.REQUESTS_IN_FLIGHT.name, ()) not in found

    fronts.update(1, _written(_recorded(1)))
    assert _numbers(fronts.add_to([]))[Metrics.REQUEST_TOKENS.name, _MODEL] == 8
    fronts.end(1)
    fronts.end(1)  # the next one died before it reported anything
    assert _numbers(fronts.add_to([]))[Metrics.REQUEST_TOKENS.name, _MODEL] == 8


@pytest.mark.parametrize("reports", [0, 1])
def test_sums_leave_the_processes_own_numbers_alone(reports: int) -> None:
    own, fronts = _recorded(2), FrontMetrics()
    for number in range(reports):
        fronts.update(number, _written(_recorded(5)))
    for _ in range(2):
        assert _numbers(fronts.add_to(own.families()))[Metrics.REQUEST_TOKENS.name, _MODEL] == 4 + 10 * reports
    assert _numbers(own.families())[Metrics.REQUEST_TOKENS.name, _MODEL] == 4
