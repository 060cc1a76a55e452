"""What a tenant at ten times its share does to another one's latency, on the fake back end, whose batches take a fixed
time.

In turns: both at their loads; the one at ten times its share; the same with both in one tenant, which nothing protects
from the other.

Run: python -m tests.bench.fairness REPOSITORY [--device-ms 20] [--max-batch 1] [--seconds 30] [--rounds 3]
"""

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.client import AsyncClient
from neuronpipe.gateway.callers.keys import create_key
from tests.bench.load import KeptAnswers, percentile_ms, send_all
from tests.bench.measurements import ratios, spread_text
from tests.bench.systems import NO_CACHE
from tests.models.versions import copy_bundle
from tests.suite.constants import constants

# Of the capacity: what the quiet tenant sends, and the share of the other.
_QUIET, _SHARE = 0.4, 0.5
_FLOOD = 10
# The flood begins earlier and ends later: what is measured is the steady state.
_BEFORE_S, _AFTER_S = 2, 1


def _requests(seed: int) -> Iterator[InferRequest]:
    for number in itertools.count(seed * 1_000_000):
        text = f"The weather report number {number} promises a fine day."
        input = TaskInput(text_classification=TextClassificationInput(text=text))
        yield InferRequest(model="classifier", input=input)


async def _turn(
    options: argparse.Namespace, repository: Path, folder: Path, flood: float, *, one_tenant: bool, seed: int
) -> tuple[KeptAnswers, KeptAnswers]:
    """The loads of the quiet tenant and of the other: open loops."""
    keys = folder / f"keys-{seed}-{flood}-{one_tenant}"
    quiet, loud = create_key(keys, "quiet", "quiet"), create_key(keys, "quiet" if one_tenant else "loud", "loud")
    arguments = ("--api-keys", str(keys), "--max-batch-size", str(options.max_batch), *NO_CACHE)
    environment = constants(fair_window_s=options.window_ms / 1000) if options.window_ms else None
    capacity = options.max_batch / options.device_ms * 1e3
    with ServiceProcess("all", "--repository", str(repository), *arguments, environment=environment) as process:
        target = process.wait_until_ready().target
        async with (
            AsyncClient(target, api_key=quiet, retries=False) as first,
            AsyncClient(target, api_key=loud, retries=False, timeout_s=None) as second,
        ):

            def send(
                client: AsyncClient, rate_per_s: float, seconds: float, seed: int
            ) -> Coroutine[Any, Any, KeptAnswers]:
                return send_all(client.infer, _requests(seed), rate_per_s=rate_per_s, seconds=seconds, seed=seed)

            flood_s = _BEFORE_S + options.seconds + _AFTER_S
            flooding = asyncio.create_task(send(second, capacity * _SHARE * flood, flood_s, seed))
            await asyncio.sleep(_BEFORE_S)
            ours = await send(first, capacity * _QUIET, options.seconds, seed + 1)
            process.stop()  # the flood's queue is not waited for
            return ours, await flooding


async def _measure(options: argparse.Namespace) -> None:
    arms = {"share": (1.0, False), "flood": (_FLOOD, False), "flood, one tenant": (_FLOOD, True)}
    p99s_ms: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as name:
        properties = {"device_time_s": str(options.device_ms / 1e3)}
        repository = copy_bundle(options.repository, "classifier", Path(name) / "repository", properties)
        for number, (arm, (flood, one_tenant)) in itertools.product(range(options.rounds), arms.items()):
            ours, other = await _turn(options, repository, Path(name), flood, one_tenant=one_tenant, seed=100 + number)
            p50_ms, p99_ms = (percentile_ms(ours.answers, percent) for percent in (50, 99))
            p99s_ms[arm].append(p99_ms)
            print(
                f"{arm}: p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, {len(ours.answers)} answered, {ours.errors} "
                f"refused; the other: {len(other.answers)} answered, {other.errors} refused",
                flush=True,
            )
    for arm in ("flood", "flood, one tenant"):
        print(f"p99, {arm} / share: {spread_text(ratios(p99s_ms[arm], p99s_ms['share']), '.2f')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--device-ms", type=float, default=20.0, help="what a batch takes")
    parser.add_argument("--max-batch", type=int, default=1, help="requests in a batch; the capacity grows with it")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-ms", type=float, default=0.0, help="of a turn; 0: the gateway's")
    asyncio.run(_measure(parser.parse_args()))
