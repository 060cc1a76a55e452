"""doors/http/console/pages.py: live figures by hand, and who listens."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from neuronpipe.core.errors import Overloaded
from neuronpipe.core.metrics import Family, Meters
from neuronpipe.core.names import Metrics
from neuronpipe.doors.http.console.pages import LiveFigures, Reading, figures, read


class _CountedMeters(Meters):
    """Says how often it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def families(self) -> Iterator[Family]:
        self.reads += 1
        return super().families()


def _at(meters: Meters, at_s: float, model: str = "") -> Reading:
    return Reading(at_s, read(meters, model).numbers)


def _figures(meters: Meters, *records: Any, model: str = "", elapsed_s: float = 2.0) -> dict[str, Any]:
    """The figures after what each of the functions records, with `elapsed_s` for each."""
    readings = [_at(meters, 0.0, model)]
    for number, record in enumerate(records, 1):
        record()
        readings.append(_at(meters, number * elapsed_s, model))
    return figures(readings)


def _request(meters: Meters, ms: float, status: str = "OK", model: str = "m") -> None:
    meters.histogram(Metrics.REQUEST_DURATION, model, "1", status).record(round(ms * 1e6))


def test_rates_are_of_the_last_interval() -> None:
    meters = Meters()

    def first() -> None:
        for _ in range(100):
            _request(meters, 1)

    def second() -> None:
        for _ in range(6):
            _request(meters, 1)
        _request(meters, 1, "RESOURCE_EXHAUSTED")
        _request(meters, 1, "INTERNAL")
        meters.counter(Metrics.SHED, "m", "1", "admission").add(3)
        meters.counter(Metrics.SHED, "m", "1", "predict").add(1)
        meters.counter(Metrics.REQUEST_TOKENS, "m", "1").add(50)

    found = _figures(meters, first, second)
    assert (found["requests_per_s"], found["errors_per_s"]) == (4.0, 1.0)
    assert (found["shed_per_s"], found["tokens_per_s"], found["window_s"]) == (2.0, 25.0, 4.0)


def test_percentiles_lie_evenly_in_their_buckets() -> None:
    meters = Meters()

    def record() -> None:
        for _ in range(90):
            _request(meters, 0.7)  # in the bucket from 0.5 to 1 ms
        for _ in range(10):
            _request(meters, 30)  # from 25 to 50 ms

    stages = _figures(meters, record)["stages"]
    # p50: 50 of the 90 in the first: 0.5 + 0.5 * 50 / 90. p95: 5 of the 10 in the second: 25 + 25 * 5 / 10.
    assert stages["request"]["p50_ms"] == pytest.approx(0.5 + 0.5 * 50 / 90)
    assert stages["request"]["p95_ms"] == pytest.approx(37.5)
    assert stages["request"]["p99_ms"] == pytest.approx(25 + 25 * 9 / 10)
    assert stages["predict.queue"] == {"p50_ms": None, "p95_ms": None, "p99_ms": None}


def test_what_lies_beyond_the_last_bound_counts_as_the_bound() -> None:
    meters = Meters()
    assert _figures(meters, lambda: _request(meters, 60_000))["stages"]["request"]["p50_ms"] == 10_000


def test_means_and_shares_are_of_the_window() -> None:
    meters = Meters()

    def batches(*sizes: int) -> None:
        for size in sizes:
            meters.histogram(Metrics.BATCH_SIZE, "m", "1").record(size)
            meters.histogram(Metrics.BATCH_PADDING, "m", "1").record(size / 10)
        meters.counter(Metrics.TOKEN_CACHE, "m", "1", "hit_memory").add(1)
        meters.counter(Metrics.TOKEN_CACHE, "m", "1", "miss").add(2)

    found = _figures(meters, lambda: batches(1, 2), lambda: batches(6))
    assert found["batch_size"] == 3.0
    assert found["padding_ratio"] == pytest.approx(0.3)
    assert found["token_cache_hits"] == pytest.approx(1 / 3)
    assert found["result_cache_hits"] is None


def test_gauges_are_of_now_and_none_where_another_process_has_them() -> None:
    meters = Meters()
    meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: 7)
    found = _figures(meters, lambda: None)
    assert (found["in_flight"], found["queue_sequences"]) == (7, None)


def test_busy_cores_are_time_computed_by_time_passed() -> None:
    meters = Meters()
    meters.counter(Metrics.CORE_BUSY, "m", "1", "0").add(0)
    busy = meters.counter(Metrics.CORE_BUSY, "m", "1", "1")
    assert _figures(meters, lambda: busy.add(3e9), elapsed_s=2.0)["busy_cores"] == 1.5


def test_one_model_can_be_chosen() -> None:
    meters = Meters()
    meters.gauge(Metrics.REQUESTS_IN_FLIGHT, lambda: 7)

    def record() -> None:
        _request(meters, 1, model="m")
        _request(meters, 1, model="other")

    found = _figures(meters, record, model="other", elapsed_s=1.0)
    assert (found["requests_per_s"], found["in_flight"]) == (1.0, 7)


async def test_a_listener_gets_figures_until_it_leaves_and_nothing_is_read_without_one() -> None:
    meters = _CountedMeters()
    live = LiveFigures(meters, interval_s=0.001)
    events = live.listen("")
    assert (live.listeners.total, meters.reads) == (0, 0)
    for _ in range(3):
        event = await anext(events)
        assert event.endswith(b"\n\n")
        assert json.loads(event.removeprefix(b"data: "))["requests_per_s"] == 0
    assert (live.listeners.total, meters.reads) == (1, 3)
    await events.aclose()
    assert live.listeners.total == 0


async def test_listeners_are_bounded() -> None:
    live = LiveFigures(Meters())
    streams = [live.listen("") for _ in range(16)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(Overloaded, match="16 consoles show live figures, the limit"):
        live.listen("")
    await streams[0].aclose()
    stream = live.listen("")
    await anext(stream)
    for listener in (*streams, stream):
        await listener.aclose()
