"""Sends one sampled request and shows its trace."""

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest
from neuronpipe.api.v1.traces_pb2_grpc import TraceServiceStub
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.names import TRACEPARENT
from neuronpipe.core.tracing import SpanContext
from neuronpipe.measure.waterfall.drawing import draw, draw_page, read_trace
from neuronpipe.platform.tls import LoadedTls, TlsFiles, watched_tls
from neuronpipe.rpc.api_key import key_metadata
from neuronpipe.rpc.client import error_of, open_channel

_TRACES_LIMIT_S = 10.0


def sample(
    request: InferRequest,
    target: str,
    *,
    timeout_s: float,
    warm_up: int,
    html: Path | None,
    otlp: Path | None,
    tls: TlsFiles | None = None,
) -> None:
    """Prints the waterfall of one request, which is sent after `warm_up` others.

    It is also written as a page and as OTLP JSON, if these are asked for. Raises SetupError, and the request's error
    once its trace is shown.
    """
    context = SpanContext(int(secrets.token_hex(16), 16), int(secrets.token_hex(8), 16), is_sampled=True)
    loaded = watched_tls(tls, "client").value if tls else None
    found, client_ns, failure = asyncio.run(_record(request, target, loaded, timeout_s, warm_up, context))
    if otlp:
        otlp.write_text(json.dumps(found, indent=1))
    trace = read_trace(found, f"{context.trace_id:032x}")
    if trace:
        print("\n".join(draw(trace, client_ns)))
        if html:
            html.write_text(draw_page(trace, client_ns))
    elif not failure:
        raise SetupError(f"{target} has dropped this trace already: --kept-traces is too small for its load")
    if failure:
        raise failure


async def _record(
    request: InferRequest, target: str, tls: LoadedTls | None, timeout_s: float, warm_up: int, context: SpanContext
) -> tuple[dict[str, Any], int, NeuronpipeError | None]:
    """The request's spans as OTLP JSON, its duration as the caller measured it, and its error if it failed."""
    key = key_metadata(target=target, is_encrypted=tls is not None)
    async with open_channel(target, tls=tls) as channel:
        for _ in range(warm_up):  # the first request of a connection also opens it
            await _infer(channel, request, timeout_s, key)
        began_ns = time.monotonic_ns()
        failure = await _infer(channel, request, timeout_s, [*key, (TRACEPARENT, context.traceparent)])
        client_ns = time.monotonic_ns() - began_ns
        return await _find_trace(channel, context, key, failure), client_ns, failure


async def _infer(
    channel: grpc.aio.Channel, request: InferRequest, timeout_s: float, metadata: Sequence[tuple[str, str]]
) -> NeuronpipeError | None:
    """What the request failed with."""
    try:
        await InferenceServiceStub(channel).Infer(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.AioRpcError as failure:
        return error_of(failure)
    return None


async def _find_trace(
    channel: grpc.aio.Channel, context: SpanContext, key: Sequence[tuple[str, str]], failure: NeuronpipeError | None
) -> dict[str, Any]:
    try:
        response = await TraceServiceStub(channel).GetTrace(
            GetTraceRequest(trace_id=f"{context.trace_id:032x}"), timeout=_TRACES_LIMIT_S, metadata=key
        )
    except grpc.aio.AioRpcError as error:
        if failure:
            raise failure from error
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            raise SetupError("the gateway keeps no traces; start it, and its stages, with --kept-traces 100") from error
        raise error_of(error) from error
    found: dict[str, Any] = json.loads(response.otlp_json)
    return found
