"""What a request over each protocol costs beside one over our own gRPC: CPU time of `serve all` with the fake back end,
all doors in one process, in turns.

Run: python -m tests.bench.door_cost REPOSITORY [--model minilm] [--requests 2000] [--rounds 5] [--callers 8]
"""

import asyncio
import json
from typing import Any

import grpc

from demo.processes import ServiceProcess
from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest
from neuronpipe.api.tei.v1.tei_pb2 import EmbedRequest
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import AsyncClient
from neuronpipe.doors.inference import MODEL_FIELD
from neuronpipe.rpc.client import open_channel
from tests.bench.costs import CostOptions, Kind, measure_costs, parse_options
from tests.bench.light_clients import HttpSender


class _Doors:
    """The ways to ask for the embedding of a text."""

    def __init__(self, model: str, client: AsyncClient, channel: grpc.aio.Channel, http: HttpSender) -> None:
        self._model, self._client, self._http = model, client, http
        self._tei: Any = channel.unary_unary("/tei.v1.Embed/Embed")
        self._oip: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def grpc(self, number: int) -> None:
        """Our own API."""
        input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text=_text(number)))
        await self._client.infer(InferRequest(model=self._model, input=input))

    async def oip(self, number: int) -> None:
        """The Open Inference Protocol, as tritonclient sends it."""
        request = ModelInferRequest(model_name=self._model)
        request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
        data = _text(number).encode()
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
        await self._oip(request.SerializeToString())

    async def tei(self, number: int) -> None:
        """text-embeddings-inference's gRPC."""
        request = EmbedRequest(inputs=_text(number))
        await self._tei(request.SerializeToString(), metadata=[(MODEL_FIELD, self._model)])

    async def http(self, number: int) -> None:
        """OpenAI's API, of whose answer nothing is read, so that the machine works for the server."""
        body = {"model": self._model, "input": _text(number), "encoding_format": "base64"}
        await self._http.call(json.dumps(body).encode())


def _text(number: int) -> str:
    return f"The weather report number {number} promises a fine day."


async def _measure(options: CostOptions) -> None:
    with ServiceProcess("all", "--repository", str(options.repository), "--http-listen", "127.0.0.1:0") as process:
        process.wait_until_ready()
        address = str(process.wait_for("listening for HTTP")["address"])
        http = await HttpSender.open(address, "/v1/embeddings", options.callers)
        async with AsyncClient(process.target) as client, open_channel(process.target) as channel:
            doors = _Doors(options.model, client, channel, http)
            calls = {"grpc": doors.grpc, "oip": doors.oip, "tei.v1": doors.tei, "http": doors.http}
            kinds = {name: Kind([process.pid], call) for name, call in calls.items()}
            await measure_costs(kinds, options.requests, options.rounds, options.callers)
        await http.close()


if __name__ == "__main__":
    asyncio.run(_measure(parse_options(__doc__)))
