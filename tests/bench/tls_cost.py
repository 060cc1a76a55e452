"""What TLS and mTLS cost beside plain connections: a call, and a connection with its first call. `serve all` with the
fake back end three times, in turns.

Run: python -m tests.bench.tls_cost REPOSITORY [--model minilm] [--requests 2000] [--connections 300] [--rounds 7]

CPU time is the server's and the client's, as the client, too, encrypts. Other work on the machine changes it less than
it changes times, and a ratio is of two turns in the same round.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import AsyncClient, TlsFiles
from neuronpipe.platform.tls import watched_tls
from neuronpipe.rpc.client import open_channel
from tests.servers.certificates import Authority, replace

_WARM_UP = 200
_CALLERS = 8
_TEXT = "The weather report promises a fine day."


@dataclass
class System:
    """A server, and how it is called. Its figures: of each kind of work, microseconds of CPU time apiece in each
    round, of the server and of the client.
    """

    target: str
    process: psutil.Process
    tls: TlsFiles | None
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    async def measure(self, what: str, work: Callable[["System"], Awaitable[int]]) -> None:
        server_s, client_s = _cpu_s(self.process), time.process_time()
        count = await work(self)
        took_s = _cpu_s(self.process) - server_s, time.process_time() - client_s
        self.figures.setdefault(what, []).append((took_s[0] / count * 1e6, took_s[1] / count * 1e6))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(options: argparse.Namespace) -> None:
    request = InferRequest(model=options.model, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=_TEXT)))

    async def calls(system: System, count: int = options.requests) -> int:
        async with AsyncClient(system.target, tls=system.tls) as client:
            await client.infer(request)

            async def call() -> None:
                for _ in range(count // _CALLERS):
                    await client.infer(request)

            await asyncio.gather(*(call() for _ in range(_CALLERS)))
        return count

    async def connections(system: System) -> int:
        loaded = watched_tls(system.tls, "client").value if system.tls else None
        for _ in range(options.connections):
            async with open_channel(system.target, tls=loaded) as channel:
                await InferenceServiceStub(channel).Infer(request)
        return int(options.connections)

    with ExitStack() as stack:
        systems = _start(options.repository, stack)
        for system in systems.values():
            await calls(system, _WARM_UP)
        for number in range(options.rounds):
            order = list(systems.values())
            for system in reversed(order) if number % 2 else order:
                await system.measure("call", calls)
                await system.measure("connection with a call", connections)
    for what in ("call", "connection with a call"):
        for name, system in systems.items():
            rounds = system.figures[what]
            server, client = (statistics.median(one[side] for one in rounds) for side in (0, 1))
            ratios = [sum(one) / sum(plain) for one, plain in zip(rounds, systems["plain"].figures[what], strict=True)]
            print(
                f"{what}, {name}: CPU time {server:.0f} µs in the server, {client:.0f} µs in the client; together to "
                f"plain {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


def _start(repository: Path, stack: ExitStack) -> Mapping[str, System]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    authority = Authority()
    authority.issue().write(folder)
    replace(folder / "ca.crt", authority.certificate)
    pair = {"NEURONPIPE_ALL_TLS_CERTIFICATE": f"{folder}/tls.crt", "NEURONPIPE_ALL_TLS_KEY": f"{folder}/tls.key"}
    ca = folder / "ca.crt"
    kinds: dict[str, tuple[dict[str, str], TlsFiles | None]] = {
        "plain": ({}, None),
        "TLS": (pair, TlsFiles(ca=ca)),
        "mTLS": (
            {**pair, "NEURONPIPE_ALL_TLS_CLIENT_CA": str(ca)},
            TlsFiles(folder / "tls.crt", folder / "tls.key", ca),
        ),
    }
    systems = {}
    for name, (environment, tls) in kinds.items():
        process = ServiceProcess("all", "--repository", str(repository), environment=environment)
        stack.enter_context(process)
        systems[name] = System(process.wait_until_ready().target, psutil.Process(process.pid), tls)
    return systems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--connections", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    asyncio.run(measure(parser.parse_args()))
