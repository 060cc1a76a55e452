"""One day from its start to its end."""

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.day.callers import Call, Callers
from tests.day.endings import Endings
from tests.day.events import Events
from tests.day.models import make_models
from tests.day.system import System, Timeline
from tests.day.watch import Watch, limits_mib, look_at_rest


@dataclass(frozen=True)
class Day:
    """What came of it. Times are those of time.monotonic(); `memory`: by process, times and MiB."""

    seconds: float
    seed: int
    began_s: float
    calls: list[Call]
    timeline: Timeline
    memory: dict[str, list[tuple[float, float]]]
    limits_mib: dict[str, float]
    jobs: int
    left: int
    health_checks: int

    @property
    def lost(self) -> list[Call]:
        """Calls that a killed process took with it."""
        return [call for call in self.calls if call.problem and self._is_of_killed(call)]

    @property
    def faults(self) -> Counter[str]:
        """All that must not be."""
        found = Counter(self.timeline.faults)
        for call in self.calls:
            if call.problem and not self._is_of_killed(call):
                at = next((text for began, ended, text in self.timeline.events if began <= call.ended_s <= ended), "")
                found[f"{call.door}: {call.problem[:300]}{at and f' ({at})'}"] += 1
        for name, samples in self.memory.items():
            if (most := max(size for _, size in samples)) > self.limits_mib[name]:
                found[f"memory of {name}: {most:.0f} MiB, the limit is {self.limits_mib[name]:.0f}"] += 1
        return found

    def _is_of_killed(self, call: Call) -> bool:
        return any(call.began_s <= gone_s and killed_s <= call.ended_s for killed_s, gone_s in self.timeline.kills)


async def live(seconds: float, seed: int) -> Day:
    """Runs a whole system for so long, and what happens to it."""
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="np-day-") as name:
        folder = Path(name)
        system = System(await asyncio.to_thread(make_models, folder), folder, timeline)
        callers, watch = Callers(system, seed), Watch(system)
        limits = limits_mib(system)
        async with system.running():
            began_s = time.monotonic()
            endings = Endings(system)
            watching, ending = asyncio.create_task(watch.run()), asyncio.create_task(endings.run())
            calling = asyncio.create_task(callers.run())
            try:
                await Events(system, callers, watch, seed).run(began_s + seconds)
                callers.end()
                await calling
                await callers.await_jobs(limit_s=60)
                await look_at_rest(system)
            finally:
                for task in (calling, watching, ending):
                    task.cancel()
                await asyncio.gather(calling, watching, ending, return_exceptions=True)
            timeline.faults.update(callers.jobs.wrong)
            timeline.faults.update(endings.problems(callers.jobs.names))
    return Day(
        seconds,
        seed,
        began_s,
        callers.calls,
        timeline,
        watch.memory,
        limits,
        len(callers.jobs.names),
        callers.left,
        watch.health_checks,
    )
