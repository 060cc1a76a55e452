"""The rpc with which a development server shows the traces that it keeps."""

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
from neuronpipe.process.door import Handler
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.endpoints import resolve
from neuronpipe.rpc.rpcs import Rpc, by_path, rpcs_of

_TRACE_SERVICE = traces_pb2.DESCRIPTOR.services_by_name["TraceService"]

_TRACE_ID = re.compile("[0-9a-f]{32}")
# A stage's process that does not answer is left out.
_STAGE_LIMIT_S = 2.0


def trace_rpcs(traces: Traces | None) -> list[Rpc]:
    """The rpcs of TraceService, of a server that keeps traces."""
    return rpcs_of(_TRACE_SERVICE) if traces else []


def trace_handlers(traces: Traces | None, stage_targets: Sequence[str] = ()) -> dict[str, Handler]:
    """Their handlers. `stage_targets`: of other services that may have spans of the same traces."""
    if not traces:
        return {}

    async def get_trace(request: GetTraceRequest, context: object) -> GetTraceResponse:
        if not _TRACE_ID.fullmatch(request.trace_id):
            raise InvalidInput("trace_id", "is not 32 lower-case hexadecimal digits")
        found = traces.find(int(request.trace_id, 16))
        resolved = await asyncio.gather(*map(resolve, stage_targets))
        addresses = sorted(set().union(*(addresses for addresses, _ in resolved)))
        for other in await asyncio.gather(*(_ask(address, request) for address in addresses)):
            found["resourceSpans"] += other
        return GetTraceResponse(otlp_json=json.dumps(found))

    return by_path(_TRACE_SERVICE, GetTrace=get_trace)


async def _ask(address: str, request: GetTraceRequest) -> list[Any]:
    async with open_channel(address) as channel:
        try:
            response = await TraceServiceStub(channel).GetTrace(request, timeout=_STAGE_LIMIT_S)
        except grpc.aio.AioRpcError as failure:
            log_warning("a stage does not show its traces", address=address, code=failure.code().name)
            return []
    spans: list[Any] = json.loads(response.otlp_json)["resourceSpans"]
    return spans
