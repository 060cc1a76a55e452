"""What a swap of versions costs its callers, how long it takes, and how long models take to load.

Run: `python -m tests.bench.swaps REPOSITORY MODEL [--turns N] [--counts 1,10,100]`

MODEL classifies texts; its version 1 of the folder REPOSITORY is copied. Nothing is written but the output.

- swaps: callers at 60 % of what one process bears, in an open loop, in turns with a swap and turns without, one after
  the other in one run. p99 of the requests that the old version answered while the new one was loaded, to that of the
  turn without.
- alias to all: four processes; the time from the end of `alias` until the gateway routes to the version, which every
  stage has then.
- cold load: the time from the start of a process to the log line `ready`, with some copies of the model.
"""

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import Signed
from neuronpipe.client import AsyncClient
from tests.bench.load import Answer, percentile_ms, send_all
from tests.callers.requests import classify
from tests.models.versions import changing_manifest
from tests.systems.versions import serves_only

_SIGNED = Signed("bench")
_NAME = "swapped"
_COLD_LIMIT_S = 1800.0
_LOAD, _CALLERS, _PROBE_S, _TURN_S = 0.6, 8, 8.0, 8.0


def _copies(source: Path, repository: Path, keys: Sequence[tuple[str, int]]) -> None:
    """Copies a bundle under other names and versions. Large files are links."""
    for name, version in keys:
        folder = repository / name / str(version)
        shutil.copytree(source, folder, copy_function=os.link)
        with changing_manifest(folder) as content:
            content["model"] |= {"name": name, "version": version}


def _make_stable(repository: Path, version: int) -> None:
    FolderRepository(repository).change_registry(lambda now: now.alias(_NAME, "stable", version, _SIGNED), _SIGNED)


def _request(number: int) -> InferRequest:
    request = classify(f"text number {number}: a sentence of some words, as callers send them")
    request.model = _NAME
    return request


async def _swaps(repository: Path, turns: int) -> None:
    with ServiceProcess("all", "--repository", str(repository)) as process:
        async with AsyncClient(process.wait_until_ready().target, timeout_s=60) as client:
            probed = await send_all(client.infer, map(_request, count()), callers=_CALLERS, seconds=_PROBE_S)
            rate = _LOAD * len(probed.answers) / _PROBE_S
            print(f"load: {rate:.0f} requests a second, {_LOAD:.0%} of what {_CALLERS} callers get", flush=True)
            ratios = []
            for turn in range(turns):
                old, new = str(1 + turn % 2), str(2 - turn % 2)
                without, _ = await _beside(client, rate, asyncio.sleep(_TURN_S), old)
                during, took_s = await _beside(client, rate, _swap(client, repository, new), old)
                p99_ms, swap_p99_ms = (percentile_ms(answers, 99) for answers in (without, during))
                ratios.append(swap_p99_ms / p99_ms)
                print(
                    f"turn {turn}: old version without a swap {len(without)} requests, p99 {p99_ms:.1f} ms; during a "
                    f"swap of {took_s:.1f} s {len(during)}, p99 {swap_p99_ms:.1f} ms: {ratios[-1]:.2f}",
                    flush=True,
                )
    print(f"p99 during a swap to that without: median {median(ratios):.2f}, all {sorted(round(r, 2) for r in ratios)}")


async def _swap(client: AsyncClient, repository: Path, version: str) -> None:
    await asyncio.to_thread(_make_stable, repository, int(version))
    await serves_only(client, version)


async def _beside(client: AsyncClient, rate: float, work: Awaitable[None], version: str) -> tuple[list[Answer], float]:
    """The answers of a version to requests at a rate, while something else is done; and how long that took."""
    has_ended, began_s = asyncio.Event(), time.monotonic()

    def requests() -> Iterator[InferRequest]:
        for number in count():
            if has_ended.is_set():
                return
            yield _request(number)

    sending = asyncio.create_task(send_all(client.infer, requests(), rate_per_s=rate))
    await work
    took_s = time.monotonic() - began_s
    has_ended.set()
    return [answer for answer in (await sending).answers if answer.data.version == version], took_s


async def _alias_to_all(repository: Path, turns: int) -> None:
    times = []
    with four_processes(repository) as processes:
        async with AsyncClient(processes["gateway"].target) as client:
            for turn in range(turns):
                new = 1 + turn % 2
                _make_stable(repository, new)
                began_s = time.monotonic()
                async with asyncio.timeout(300):
                    while (await client.infer(_request(turn))).version != str(new):
                        await asyncio.sleep(0.01)
                times.append(time.monotonic() - began_s)
                await serves_only(client, str(new))
    print(f"alias to all four processes: median {median(times):.2f} s, all {[round(took_s, 2) for took_s in times]}")


def _cold_load(source: Path, counts: Sequence[int]) -> None:
    for models in counts:
        with ExitStack() as stack:
            repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".", dir=source.parents[1])))
            _copies(source, repository, [(f"copy-{number}", 1) for number in range(models)])
            began_s = time.monotonic()
            stack.enter_context(ServiceProcess("all", "--repository", str(repository))).wait_until_ready(_COLD_LIMIT_S)
            took_s = time.monotonic() - began_s
            print(f"cold load of {models} models: {took_s:.2f} s, {took_s / models:.3f} s a model", flush=True)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repository", type=Path)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--counts", default="1,10,100")
    options = parser.parse_args()
    source = options.repository / options.model / "1"
    # In the same file system: files are linked.
    with tempfile.TemporaryDirectory(prefix=".", dir=options.repository) as folder:
        _copies(source, Path(folder), [(_NAME, 1), (_NAME, 2)])
        _make_stable(Path(folder), 1)
        asyncio.run(_swaps(Path(folder), options.turns))
        _make_stable(Path(folder), 2)
        asyncio.run(_alias_to_all(Path(folder), options.turns))
    _cold_load(source, [int(number) for number in options.counts.split(",")])


if __name__ == "__main__":
    main()
