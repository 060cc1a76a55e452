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
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import Signed
from neuronpipe.client import AsyncClient
from tests.integration.requests import classify
from tests.integration.test_registry import serves_only

_SIGNED = Signed("bench")
_NAME = "swapped"
_COLD_LIMIT_S = 1800.0
_LOAD, _CALLERS, _PROBE_S, _TURN_S = 0.6, 8, 8.0, 8.0


@dataclass(frozen=True, slots=True)
class _Answer:
    version: str
    began_s: float
    took_s: float


def _copies(source: Path, repository: Path, keys: Sequence[tuple[str, int]]) -> None:
    """Copies a bundle under other names and versions. Large files are links."""
    for name, version in keys:
        folder = repository / name / str(version)
        shutil.copytree(source, folder, copy_function=os.link)
        content = json.loads((folder / MANIFEST_FILE).read_text())
        content["model"] |= {"name": name, "version": version}
        (folder / MANIFEST_FILE).unlink()
        (folder / MANIFEST_FILE).write_text(json.dumps(content))


def _make_stable(repository: Path, version: int) -> None:
    FolderRepository(repository).change_registry(lambda now: now.alias(_NAME, "stable", version, _SIGNED), _SIGNED)


def _request(number: int) -> InferRequest:
    request = classify(f"text number {number}: a sentence of some words, as callers send them")
    request.model = _NAME
    return request


async def _capacity(client: AsyncClient) -> float:
    """Requests a second of callers without a pause."""
    ends_s, count = time.monotonic() + _PROBE_S, 0

    async def call(caller: int) -> None:
        nonlocal count
        while time.monotonic() < ends_s:
            count += 1
            await client.infer(_request(count * _CALLERS + caller))

    await asyncio.gather(*map(call, range(_CALLERS)))
    return count / _PROBE_S


async def _send(client: AsyncClient, rate: float, ends: asyncio.Event) -> list[_Answer]:
    """Sends requests at a rate until the event, whether or not the ones before have been answered."""
    answers: list[_Answer] = []

    async def call(number: int, due_s: float) -> None:
        response = await client.infer(_request(number), timeout_s=60)
        answers.append(_Answer(response.version, due_s, time.monotonic() - due_s))

    async with asyncio.TaskGroup() as group:
        begun_s, number = time.monotonic(), 0
        while not ends.is_set():
            due_s = begun_s + number / rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(call(number, due_s))
            number += 1
    return answers


def _p99_ms(answers: Sequence[_Answer]) -> float:
    return sorted(one.took_s for one in answers)[min(len(answers) - 1, int(len(answers) * 0.99))] * 1e3


async def _swaps(repository: Path, turns: int) -> None:
    with ServiceProcess("all", "--repository", str(repository)) as process:
        async with AsyncClient(process.wait_until_ready().target) as client:
            rate = _LOAD * await _capacity(client)
            print(f"load: {rate:.0f} requests a second, {_LOAD:.0%} of what {_CALLERS} callers get", flush=True)
            ratios = []
            for turn in range(turns):
                old, new = str(1 + turn % 2), str(2 - turn % 2)
                found = []
                for swaps in (False, True):
                    ends = asyncio.Event()
                    sending = asyncio.create_task(_send(client, rate, ends))
                    began_s = time.monotonic()
                    if swaps:
                        await asyncio.to_thread(_make_stable, repository, int(new))
                        await serves_only(client, new)
                    else:
                        await asyncio.sleep(_TURN_S)
                    took_s = time.monotonic() - began_s
                    ends.set()
                    found.append([one for one in await sending if one.version == old])
                without, during = map(_p99_ms, found)
                ratios.append(during / without)
                print(
                    f"turn {turn}: old version without a swap {len(found[0])} requests, p99 {without:.1f} ms; during a "
                    f"swap of {took_s:.1f} s {len(found[1])}, p99 {during:.1f} ms: {ratios[-1]:.2f}",
                    flush=True,
                )
    print(f"p99 during a swap to that without: median {median(ratios):.2f}, all {sorted(round(r, 2) for r in ratios)}")


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
    print(f"alias to all four processes: median {median(times):.2f} s, all {[round(one, 2) for one in times]}")


def _cold_load(source: Path, counts: Sequence[int]) -> None:
    for count in counts:
        with ExitStack() as stack:
            repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".", dir=source.parents[1])))
            _copies(source, repository, [(f"copy-{number}", 1) for number in range(count)])
            began_s = time.monotonic()
            stack.enter_context(ServiceProcess("all", "--repository", str(repository))).wait_until_ready(_COLD_LIMIT_S)
            took_s = time.monotonic() - began_s
            print(f"cold load of {count} models: {took_s:.2f} s, {took_s / count:.3f} s a model", flush=True)


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
    _cold_load(source, [int(one) for one in options.counts.split(",")])


if __name__ == "__main__":
    main()
