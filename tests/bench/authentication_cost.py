"""What authentication costs a call: CPU time of `serve all` with the fake back end, without it, with an API key, and
with tokens, in turns.

Run: python -m tests.bench.authentication_cost REPOSITORY [--requests 2000] [--rounds 5] [--callers 8]
"""

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.client import AsyncClient
from neuronpipe.gateway.callers.keys import create_key
from tests.unit.gateway.callers.jwks import AUDIENCE, ISSUER, Issuer

_WARM_UP = 200


async def run(client: AsyncClient, requests: int, callers: int) -> None:
    """Sends so many requests, each caller one after the other."""
    input = TaskInput(text_classification=TextClassificationInput(text="The weather report promises a fine day."))

    async def call() -> None:
        for _ in range(requests // callers):
            await client.infer(InferRequest(model="classifier", input=input))

    await asyncio.gather(*(call() for _ in range(callers)))


def cpu_s(process: ServiceProcess) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


async def measure(options: argparse.Namespace) -> None:
    issuer = Issuer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = create_key(folder / "keys", "a", "a")
        (folder / "jwks").write_bytes(issuer.jwks())
        (folder / "tenants.toml").write_text("[tenants.a]\n[tenants.search]\n")
        repository = ("--repository", str(options.repository))
        tokens = ("--jwks", str(folder / "jwks"), "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE)
        files = ("--api-keys", str(folder / "keys"), "--tenants", str(folder / "tenants.toml"))
        with (
            ServiceProcess("all", *repository) as plain,
            ServiceProcess("all", *repository, *tokens, *files) as guarded,
        ):
            arms = {
                "plain": (plain, ""),
                "key": (guarded, key),
                "ES256": (guarded, issuer.sign("ec")),
                "RS256": (guarded, issuer.sign("rsa")),
            }
            async with AsyncExitStack() as stack:
                clients = {}
                for arm, (process, secret) in arms.items():
                    target = process.wait_until_ready().target
                    clients[arm] = await stack.enter_async_context(AsyncClient(target, api_key=secret))
                    await run(clients[arm], _WARM_UP, options.callers)
                cpu_us: dict[str, list[float]] = {arm: [] for arm in arms}
                for _ in range(options.rounds):
                    for arm, (process, _) in arms.items():
                        before_s = cpu_s(process)
                        await run(clients[arm], options.requests, options.callers)
                        cpu_us[arm].append((cpu_s(process) - before_s) / options.requests * 1e6)
    for arm, found in cpu_us.items():
        ratios = [one / base for one, base in zip(found, cpu_us["plain"], strict=True)]
        print(
            f"{arm}: {statistics.median(found):.0f} µs of CPU time a request ({min(found):.0f} to {max(found):.0f}); "
            f"to plain {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=8)
    asyncio.run(measure(parser.parse_args()))
