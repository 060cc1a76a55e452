"""What a tenant at ten times its share does to another one's latency, on the fake back end, whose batches take a fixed
time.

In turns: both at their loads; the one at ten times its share; the same with both in one tenant, which nothing protects
from the other.

Run: python -m tests.bench.fairness REPOSITORY [--device-ms 20] [--max-batch 1] [--seconds 30] [--rounds 3]
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.gateway.callers.keys import create_key
from tests.suite.constants import constants

# Of the capacity: what the quiet tenant sends, and the share of the other.
_QUIET, _SHARE = 0.4, 0.5
_FLOOD = 10


@dataclass
class Load:
    """A tenant's requests of one turn. Latencies in seconds, of those that were answered."""

    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.latencies_s, n=100)[98] * 1e3

    @property
    def median_ms(self) -> float:
        return statistics.median(self.latencies_s) * 1e3


async def send(client: AsyncClient, rate: float, seconds: float, seed: int) -> Load:
    """An open loop: requests at the times of a Poisson process."""
    load, random_ = Load(), random.Random(seed)

    async def ask(number: int) -> None:
        text = f"The weather report number {number} promises a fine day."
        input = TaskInput(text_classification=TextClassificationInput(text=text))
        began_s = time.perf_counter()
        try:
            await client.infer(InferRequest(model="classifier", input=input))
        except NeuronpipeError:
            load.refused += 1
        else:
            load.latencies_s.append(time.perf_counter() - began_s)

    ends_s = time.monotonic() + seconds
    next_s, number = time.monotonic(), seed * 1_000_000
    async with asyncio.TaskGroup() as group:
        while next_s < ends_s:
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            group.create_task(ask(number))
            next_s += random_.expovariate(rate)
            number += 1
    return load


async def turn(
    options: argparse.Namespace, repository: Path, folder: Path, flood: float, *, one_tenant: bool, seed: int
) -> tuple[Load, Load]:
    """The loads of the quiet tenant and of the other."""
    keys = folder / f"keys-{seed}-{flood}-{one_tenant}"
    quiet, loud = create_key(keys, "quiet", "quiet"), create_key(keys, "quiet" if one_tenant else "loud", "loud")
    arguments = ["--api-keys", str(keys), "--max-batch-size", str(options.max_batch), "--token-cache-bytes", "0"]
    environment = constants(fair_window_s=options.window_ms / 1000) if options.window_ms else None
    capacity = options.max_batch / options.device_ms * 1e3
    with ServiceProcess("all", "--repository", str(repository), *arguments, environment=environment) as process:
        target = process.wait_until_ready().target
        async with (
            AsyncClient(target, api_key=quiet, retries=False) as first,
            AsyncClient(target, api_key=loud, retries=False, timeout_s=None) as second,
        ):
            flooding = asyncio.create_task(send(second, capacity * _SHARE * flood, options.seconds + 3, seed))
            await asyncio.sleep(2)  # what is measured is the steady state
            ours = await send(first, capacity * _QUIET, options.seconds, seed + 1)
            process.stop()  # the flood's queue is not waited for
            return ours, await flooding


async def measure(options: argparse.Namespace) -> None:
    arms = {"share": (1.0, False), "flood": (_FLOOD, False), "flood, one tenant": (_FLOOD, True)}
    p99_ms: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(options.repository / "classifier", folder / "repository" / "classifier")
        manifest = folder / "repository" / "classifier" / "1" / MANIFEST_FILE
        content = json.loads(manifest.read_text())
        content["artifacts"][0]["properties"] = {"device_time_s": str(options.device_ms / 1e3)}
        manifest.write_text(json.dumps(content))
        for number in range(options.rounds):
            for arm, (flood, one_tenant) in arms.items():
                ours, other = await turn(
                    options, folder / "repository", folder, flood, one_tenant=one_tenant, seed=100 + number
                )
                p99_ms[arm].append(ours.p99_ms)
                print(
                    f"{arm}: p50 {ours.median_ms:.0f} ms, p99 {ours.p99_ms:.0f} ms, {len(ours.latencies_s)} answered, "
                    f"{ours.refused} refused; the other: {len(other.latencies_s)} answered, {other.refused} refused",
                    flush=True,
                )
    for arm in ("flood", "flood, one tenant"):
        ratios = [one / base for one, base in zip(p99_ms[arm], p99_ms["share"], strict=True)]
        print(f"p99, {arm} / share: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--device-ms", type=float, default=20.0, help="what a batch takes")
    parser.add_argument("--max-batch", type=int, default=1, help="requests in a batch; the capacity grows with it")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-ms", type=float, default=0.0, help="of a turn; 0: the gateway's")
    asyncio.run(measure(parser.parse_args()))
