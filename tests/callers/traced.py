"""Reads the spans and metrics of a sampled request from a collector, for each kind of system."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.core.names import Spans
from neuronpipe.platform.tls import TlsFiles, watched_tls
from neuronpipe.rpc.client import open_channel

# service → the spans that each of its requests has there.
TREE = {
    "gateway": [Spans.INFER, Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS],
    "tokenizer": [Spans.TOKENIZE_RPC],
    "neuron-executor": [Spans.EXECUTE_RPC, Spans.QUEUE, Spans.COMPUTE],
    "postprocessor": [Spans.POSTPROCESS_RPC],
}
# span → its parent.
PARENTS = {
    Spans.PREPROCESS: Spans.INFER,
    Spans.PREDICT: Spans.INFER,
    Spans.POSTPROCESS: Spans.INFER,
    Spans.TOKENIZE_RPC: Spans.PREPROCESS,
    Spans.EXECUTE_RPC: Spans.PREDICT,
    Spans.POSTPROCESS_RPC: Spans.POSTPROCESS,
    Spans.QUEUE: Spans.EXECUTE_RPC,
    Spans.COMPUTE: Spans.EXECUTE_RPC,
}


@dataclass(frozen=True)
class Answered:
    """A response, and where its trace is to be found."""

    trace_id: str
    parent_id: str
    response: InferResponse


async def ask_sampled(
    target: str, requests: Sequence[InferRequest], *, flags: str = "01", tls: TlsFiles | None = None
) -> list[Answered]:
    """Sends the requests at once, each in a trace of its own."""
    async with open_channel(target, tls=watched_tls(tls, "client").value if tls else None) as channel:
        stub = InferenceServiceStub(channel)

        async def ask(request: InferRequest) -> Answered:
            trace_id, parent_id = f"{random.getrandbits(128):032x}", f"{random.getrandbits(64):016x}"
            metadata = (("traceparent", f"00-{trace_id}-{parent_id}-{flags}"),)
            return Answered(trace_id, parent_id, await stub.Infer(request, timeout=30, metadata=metadata))

        return await asyncio.gather(*map(ask, requests))
