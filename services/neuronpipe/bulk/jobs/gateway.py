"""The gateway as a worker calls it: with bulk priority, for the tenants whose jobs it runs."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, Priority
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.core.errors import Cancelled, NeuronpipeError, Overloaded, Unauthenticated, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.core.names import ON_BEHALF, TRACEPARENT
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.tls.files import TlsFiles
from neuronpipe.rpc.api_key import key_metadata
from neuronpipe.rpc.client import error_of
from neuronpipe.rpc.connection import Connection

ResultT = TypeVar("ResultT")

# Between attempts while the gateway cannot be reached: doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0


class Gateway:
    """Calls a gateway as fast as it admits bulk work: where it refuses a call, no other one is sent for as long as it
    says.
    """

    def __init__(self, target: str, tls: TlsFiles | None, max_in_flight: int) -> None:
        """Raises SetupError for TLS files that cannot be used."""
        self._connection = Connection(target, InferenceServiceStub, None, tls)
        self._key = key_metadata()
        self._places = asyncio.Semaphore(max_in_flight)
        self._closed_until_s = 0.0

    @property
    def closed_s(self) -> float:
        """For how many seconds it admits no more work."""
        return max(0.0, self._closed_until_s - time.monotonic())

    async def outcome(
        self, request: InferRequest, tenant: str, trace: SpanContext | None, limit_s: float, sent: Callable[[], None]
    ) -> InferOutcome:
        """What comes of a request. It is sent until the gateway has worked on it, which may take `limit_s` seconds.
        Calls `sent` each time.
        """
        request.priority = Priority.PRIORITY_BULK
        metadata = self.metadata(tenant, trace)
        try:
            return await self.admitted(lambda: self._infer(request, metadata, limit_s), tenant, sent)
        except NeuronpipeError as error:
            return InferOutcome(error=to_status(error))

    def metadata(self, tenant: str, trace: SpanContext | None) -> list[tuple[str, str]]:
        """What a call for a tenant shows the gateway."""
        metadata = [*self._key, *([(ON_BEHALF, tenant)] if tenant else [])]
        return [*metadata, (TRACEPARENT, trace.traceparent)] if trace else metadata

    async def admitted(self, call: Callable[[], Awaitable[ResultT]], tenant: str, sent: Callable[[], None]) -> ResultT:
        """What a call returns, which is made until the gateway admits it. Raises the call's other errors."""
        pause_s = _FIRST_PAUSE_S
        while True:
            async with self._places:
                await asyncio.sleep(self.closed_s)
                sent()
                try:
                    return await call()
                except Overloaded as error:
                    self._close(error.retry_after_s)
                except (Unavailable, Cancelled, Unauthenticated) as error:
                    if isinstance(error, Unauthenticated):
                        log_warning("the gateway does not let this worker call for the tenant of a job", tenant=tenant)
                    self._close(pause_s)
                    pause_s = min(_LAST_PAUSE_S, 2 * pause_s)

    async def close(self) -> None:
        """Ends all calls."""
        await self._connection.close()

    def _close(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds * random.uniform(1.0, 1.2)  # noqa: S311
        self._closed_until_s = max(self._closed_until_s, until_s)

    async def _infer(self, request: InferRequest, metadata: Sequence[tuple[str, str]], limit_s: float) -> InferOutcome:
        ends_s = time.monotonic() + limit_s
        with self._connection.use() as stub:
            try:
                return InferOutcome(response=await stub.Infer(request, timeout=limit_s, metadata=metadata))
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, ends_s - time.monotonic()) from failure
