"""What a flood of jobs does to real-time requests.

Run: `python -m tests.bench.jobs_beside REPOSITORY MODEL [WORKER'S OPTION…]`

MODEL makes sentence embeddings. One gateway, one Redis and one worker. Turns with jobs waiting and turns without take
place one after the other in one run; in each turn a few callers send texts of their own and wait for their answers.
Prints p50 and p99 of both, and the ratio of the p99. Nothing is written.
"""

import asyncio
import sys
import time
from pathlib import Path
from statistics import median

from neuronpipe.client import AsyncClient
from tests.bench.callers import percentiles_ms
from tests.integration.job_system import JobSystem, job_system
from tests.integration.requests import embed

_TURNS, _TURN_S, _CALLERS = 8, 6.0, 4
_FLOOD, _INPUTS = 400, 10


async def _latencies(client: AsyncClient, model: str, seconds: float) -> list[float]:
    ends_s = time.monotonic() + seconds
    found: list[float] = []

    async def call(caller: int) -> None:
        number = 0
        while (began_s := time.monotonic()) < ends_s:
            number += 1
            await client.infer(embed(f"a text of caller {caller}, number {number} at {began_s}", model=model))
            found.append(time.monotonic() - began_s)
            await asyncio.sleep(0.02)

    await asyncio.gather(*(call(caller) for caller in range(_CALLERS)))
    return found


async def _flood(client: AsyncClient, model: str, turn: int) -> list[str]:
    names = []
    for number in range(_FLOOD):
        texts = [embed(f"turn {turn} job {number} input {one}", model=model) for one in range(_INPUTS)]
        names.append((await client.submit(texts)).name)
    return names


async def _measure(jobs: JobSystem, model: str) -> None:
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    async with AsyncClient(jobs.gateway.target) as client:
        await _latencies(client, model, 2.0)
        for turn in range(_TURNS):
            alone.append(await _latencies(client, model, _TURN_S))
            names = await _flood(client, model, turn)
            beside.append(await _latencies(client, model, _TURN_S))
            left = [name for name in names if not (await client.job(name).status()).is_done]
            ended = (_FLOOD - len(left)) * _INPUTS
            print(f"turn {turn}: {ended} inputs of jobs were answered, {ended / _TURN_S:.0f} a second", flush=True)
            for name in left:
                await client.job(name).cancel()
            await asyncio.sleep(4)  # until the worker has renewed its leases, and stopped what was cancelled
    for name, turns in (("alone", alone), ("with jobs", beside)):
        every = [one for turn in turns for one in turn]
        p50_ms, _, p99_ms = percentiles_ms(every)
        print(f"{name:10} {len(every):6} requests  p50 {p50_ms:7.2f} ms  p99 {p99_ms:7.2f} ms")
    ratios = [percentiles_ms(b)[2] / percentiles_ms(a)[2] for a, b in zip(alone, beside, strict=True)]
    print(f"p99 with jobs to p99 alone, of each turn: {', '.join(f'{one:.2f}' for one in ratios)}")
    print(f"median: {median(ratios):.2f}")


def main() -> None:
    """Measures."""
    repository, model, *options = sys.argv[1:]
    with job_system(Path(repository)) as jobs, jobs.worker("--lease-s", "6", *options):
        asyncio.run(_measure(jobs, model))


if __name__ == "__main__":
    main()
