"""What a request over each protocol costs beside one over our own gRPC: CPU time of `serve all` with the fake back end,
all doors in one process, in turns.

Run: python -m tests.bench.door_cost REPOSITORY [--model minilm] [--requests 2000] [--rounds 5] [--callers 8]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil

from demo.processes import ServiceProcess
from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest
from neuronpipe.api.tei.v1.tei_pb2 import EmbedRequest
from neuronpipe.api.tei.v1.tei_pb2_grpc import EmbedStub
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import AsyncClient
from neuronpipe.doors.inference import MODEL_FIELD
from neuronpipe.rpc.client import open_channel

_WARM_UP = 200

# Sends one request.
Ask = Callable[[str], Awaitable[None]]


class HttpConnection:
    """One connection, kept alive.

    It reads no more of an answer than it must, so that the machine works for the server.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, model: str) -> None:
        self._reader, self._writer, self._model = reader, writer, model

    async def ask(self, text: str) -> None:
        body = json.dumps({"model": self._model, "input": text, "encoding_format": "base64"}).encode()
        head = (
            b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self._writer.write(head + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
        length = next(line for line in answer.split(b"\r\n") if line.startswith(b"content-length"))
        await self._reader.readexactly(int(length.partition(b":")[2]))


def ask_oip(channel: grpc.aio.Channel, model: str) -> Ask:
    """Sends one request of the Open Inference Protocol, as tritonclient does."""
    infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    request = ModelInferRequest(model_name=model)
    request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])

    async def ask(text: str) -> None:
        data = text.encode()
        request.raw_input_contents[:] = [len(data).to_bytes(4, "little") + data]
        await infer(request.SerializeToString())

    return ask


async def run(asks: list[Ask], requests: int) -> None:
    """Sends so many requests, each caller one after the other."""

    async def call(ask: Ask, texts: range) -> None:
        for number in texts:
            await ask(f"The weather report number {number} promises a fine day.")

    await asyncio.gather(*(call(ask, range(first, requests, len(asks))) for first, ask in enumerate(asks)))


async def measure(options: argparse.Namespace) -> None:
    with ServiceProcess("all", "--repository", str(options.repository), "--http-listen", "127.0.0.1:0") as process:
        process.wait_until_ready()
        host, _, port = str(process.wait_for("listening for HTTP")["address"]).rpartition(":")
        server = psutil.Process(process.pid)

        def cpu_s() -> float:
            times = server.cpu_times()
            return float(times.user + times.system)

        async with AsyncClient(process.target) as client, open_channel(process.target) as channel:

            async def ask_grpc(text: str) -> None:
                await client.infer(
                    InferRequest(
                        model=options.model, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text))
                    )
                )

            stub = EmbedStub(channel)

            async def ask_tei(text: str) -> None:
                await stub.Embed(EmbedRequest(inputs=text), metadata=[(MODEL_FIELD, options.model)])

            connections = [await asyncio.open_connection(host, int(port)) for _ in range(options.callers)]
            doors: dict[str, list[Ask]] = {
                "grpc": [ask_grpc] * options.callers,
                "oip": [ask_oip(channel, options.model)] * options.callers,
                "tei.v1": [ask_tei] * options.callers,
                "http": [HttpConnection(*connection, options.model).ask for connection in connections],
            }
            for asks in doors.values():
                await run(asks, _WARM_UP)
            cpu_us: dict[str, list[float]] = {name: [] for name in doors}
            rate: dict[str, list[float]] = {name: [] for name in doors}
            for _ in range(options.rounds):
                for name, asks in doors.items():
                    before_s, began_s = cpu_s(), time.perf_counter()
                    await run(asks, options.requests)
                    cpu_us[name].append((cpu_s() - before_s) / options.requests * 1e6)
                    rate[name].append(options.requests / (time.perf_counter() - began_s))
            for _, writer in connections:
                writer.close()
    for name in doors:
        print(
            f"{name}: CPU time a request, median of {options.rounds} rounds: {statistics.median(cpu_us[name]):.0f} µs",
            end="",
        )
        print(f" ({min(cpu_us[name]):.0f} to {max(cpu_us[name]):.0f}); {statistics.median(rate[name]):.0f} requests/s")
    for name in list(doors)[1:]:
        ratios = [other / ours for other, ours in zip(cpu_us[name], cpu_us["grpc"], strict=True)]
        print(f"{name}/grpc: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=8)
    asyncio.run(measure(parser.parse_args()))
