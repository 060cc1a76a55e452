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
from neuronpipe.platform.tls import LoadedTls, WatchedTls
from neuronpipe.rpc.client import open_channel
from neuronpipe.rpc.endpoints import resolve
from neuronpipe.rpc.rpcs import RpcHandlers, handlers_of

_TRACE_SERVICE = traces_pb2.DESCRIPTOR.services_by_name["TraceService"]
_TRACE_ID = re.compile("[0-9a-f]{32}")
# The time limit for the process of a stage. The answer omits a process that exceeds it.
_STAGE_LIMIT_S = 2.0


def trace_services(traces: Traces | None) -> list[str]:
    """Returns the name of TraceService, or none for a server that keeps no traces."""
    return [_TRACE_SERVICE.full_name] if traces else []


class TraceDoor:
    """TraceService. `stage_targets`: targets of services that may have spans of the same traces."""

    def __init__(self, traces: Traces, stage_targets: Sequence[str] = (), stage_tls: WatchedTls | None = None) -> None:
        self._traces = traces
        self._stage_targets = stage_targets
        self._stage_tls = stage_tls

    def handlers(self) -> RpcHandlers:
        return handlers_of(_TRACE_SERVICE, {"GetTrace": lambda message, context: self.get_trace(message)})

    async def get_trace(self, request: GetTraceRequest) -> GetTraceResponse:
        if not _TRACE_ID.fullmatch(request.trace_id):
            raise InvalidInput("trace_id", "is not 32 lower-case hexadecimal digits")
        trace = self._traces.find(int(request.trace_id, 16))
        resolved = await asyncio.gather(*map(resolve, self._stage_targets))
        addresses = dict(sorted(pair for of_target, _ in resolved for pair in of_target.items()))
        tls = self._stage_tls.value if self._stage_tls else None
        asking = (_ask(address, server_name, tls, request) for address, server_name in addresses.items())
        for spans in await asyncio.gather(*asking):
            trace["resourceSpans"] += spans
        return GetTraceResponse(otlp_json=json.dumps(trace))


def trace_handlers(traces: Traces | None) -> RpcHandlers:
    """Returns the TraceService of a stage that keeps traces."""
    return TraceDoor(traces).handlers() if traces else []


async def _ask(address: str, server_name: str, tls: LoadedTls | None, request: GetTraceRequest) -> list[Any]:
    async with open_channel(address, tls=tls, server_name=server_name) as channel:
        try:
            response = await TraceServiceStub(channel).GetTrace(request, timeout=_STAGE_LIMIT_S)
        except grpc.aio.AioRpcError as failure:
            log_warning("a stage does not show its traces", address=address, code=failure.code().name)
            return []
    spans: list[Any] = json.loads(response.otlp_json)["resourceSpans"]
    return spans
