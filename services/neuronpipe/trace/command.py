"""The command `neuronpipe trace`: sends one sampled request and shows what became of it."""

import argparse
import asyncio
import json
import secrets
import time
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest
from neuronpipe.api.v1.traces_pb2_grpc import TraceServiceStub
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.telemetry import TRACEPARENT
from neuronpipe.core.tracing import SpanContext
from neuronpipe.rpc.client import error_of, open_channel
from neuronpipe.trace.page import draw_page
from neuronpipe.trace.spans import read_trace
from neuronpipe.trace.waterfall import draw

_TRACES_LIMIT_S = 10.0


def run(options: argparse.Namespace, request: InferRequest) -> None:
    """Runs the command. Raises SetupError, and the request's error once its trace is shown."""
    asyncio.run(_run(options, request))


async def _run(options: argparse.Namespace, request: InferRequest) -> None:
    context = SpanContext(int(secrets.token_hex(16), 16), int(secrets.token_hex(8), 16), is_sampled=True)
    async with open_channel(options.target) as channel:
        for _ in range(options.warm_up):  # the first request of a connection also opens it
            await _infer(channel, request, options.timeout_s, None)
        began_ns = time.monotonic_ns()
        failure = await _infer(channel, request, options.timeout_s, context)
        client_ns = time.monotonic_ns() - began_ns
        otlp = await _find_trace(channel, context, failure)
    trace_id = f"{context.trace_id:032x}"
    if options.otlp:
        options.otlp.write_text(json.dumps(otlp, indent=1))
    trace = read_trace(otlp, trace_id)
    if trace:
        print("\n".join(draw(trace, client_ns)))
        if options.html:
            options.html.write_text(draw_page(trace, client_ns))
    elif not failure:
        raise SetupError(f"{options.target} keeps traces, but this one not any more: --kept-traces is too small for its load")
    if failure:
        raise failure


async def _infer(channel: grpc.aio.Channel, request: InferRequest, timeout_s: float, context: SpanContext | None) -> NeuronpipeError | None:
    """What the request failed with."""
    metadata = ((TRACEPARENT, context.traceparent),) if context else ()
    try:
        await InferenceServiceStub(channel).Infer(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as failure:
        return error_of(failure)
    return None


async def _find_trace(channel: grpc.aio.Channel, context: SpanContext, failure: NeuronpipeError | None) -> dict[str, Any]:
    try:
        response = await TraceServiceStub(channel).GetTrace(GetTraceRequest(trace_id=f"{context.trace_id:032x}"), timeout=_TRACES_LIMIT_S)
    except grpc.aio.AioRpcError as error:
        if failure:
            raise failure from error
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise SetupError("the gateway keeps no traces; start it, and its stages, with --kept-traces 100") from error
        raise error_of(error) from error
    found: dict[str, Any] = json.loads(response.otlp_json)
    return found
