"""bulk/jobs/server.py: the gauges of jobs."""

import asyncio
from typing import Any

import pytest

from neuronpipe.bulk.jobs import server
from neuronpipe.bulk.jobs.job import Counts
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.metrics import Meters


async def test_no_gauge_keeps_its_value_while_redis_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_SHOW_EVERY_S", 0)
    meters = Meters()
    shown: list[set[str]] = []

    class Store:
        async def count(self) -> tuple[dict[str, Counts], int, int]:
            shown.append({family.instrument.name for family in meters.families()})
            if len(shown) == 1:
                return {"normal": Counts(waiting=1, running=2, oldest_s=3)}, 4, 5
            if len(shown) == 2:
                raise Unavailable("Redis does not answer")
            raise asyncio.CancelledError

    store: Any = Store()
    with pytest.raises(asyncio.CancelledError):
        await server.show_counts(store, meters)
    assert [len(names) for names in shown] == [0, 5, 0], shown
