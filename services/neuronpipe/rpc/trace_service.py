"""The rpc that returns the traces that a development server keeps."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import grpc

from neuronpipe.api.v1 import traces_pb2
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest, GetTraceResponse
from neuronpipe.api.v1.traces_pb2_grpc import TraceServiceStub
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Traces
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.tls import LoadedTls, WatchedTls
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.endpoints import resolve
from neuronpipe.rpc.rpcs import Rpc, by_path, rpcs_of

_TRACE_SERVICE = traces_pb2.DESCRIPTOR.services_by_name["TraceService"]
GET_TRACE = f"/{_TRACE_SERVICE.full_name}/GetTrace"

_TRACE_ID = re.compile("[0-9a-f]{32}")
# The time limit for a stage's process. One that does not answer is left out.
_STAGE_LIMIT_S = 2.0


def trace_rpcs(traces: Traces | None) -> list[Rpc]:
    """The rpcs of TraceService, of a server that keeps traces."""
    return rpcs_of(_TRACE_SERVICE) if traces else []


def trace_handlers(
    traces: Traces | None, stage_targets: Sequence[str] = (), stage_tls: WatchedTls | None = None
) -> dict[str, Handler]:
    """Their handlers. `stage_targets`: of other services that may have spans of the same traces."""
    if not traces:
        return {}

    async def get_trace(request: GetTraceRequest, context: object) -> GetTraceResponse:
        if not _TRACE_ID.fullmatch(request.trace_id):
            raise InvalidInput("trace_id", "is not 32 lower-case hexadecimal digits")
        found = traces.find(int(request.trace_id, 16))
        resolved = await asyncio.gather(*map(resolve, stage_targets))
        addresses = dict(sorted(one for found_addresses, _ in resolved for one in found_addresses.items()))
        tls = stage_tls.value if stage_tls else None
        for other in await asyncio.gather(*(_ask(*one, tls, request) for one in addresses.items())):
            found["resourceSpans"] += other
        return GetTraceResponse(otlp_json=json.dumps(found))

    return by_path(_TRACE_SERVICE, GetTrace=get_trace)


async def _ask(address: str, server_name: str, tls: LoadedTls | None, request: GetTraceRequest) -> list[Any]:
    async with open_channel(address, tls=tls, server_name=server_name) as channel:
        try:
            response = await TraceServiceStub(channel).GetTrace(request, timeout=_STAGE_LIMIT_S)
        except grpc.aio.AioRpcError as failure:
            log_warning("a stage does not show its traces", address=address, code=failure.code().name)
            return []
    spans: list[Any] = json.loads(response.otlp_json)["resourceSpans"]
    return spans
