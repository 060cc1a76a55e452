"""Calls the gateway with bulk priority, as fast as it admits bulk work."""

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
from neuronpipe.platform.process.background import Places
from neuronpipe.platform.tls import TlsFiles
from neuronpipe.rpc.client import ServiceConnection, error_of, key_metadata, undamaged

ResultT = TypeVar("ResultT")

# Pauses between attempts while the gateway cannot be reached, doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0
# Maximum number of reasons in the log why the gateway does not answer.
_MAX_REASONS = 8


class BulkGateway:
    """Calls a gateway as fast as it admits bulk work.

    If the gateway refuses a tenant's call, or cannot answer it, no other call of this tenant is sent for the time that
    the gateway asks for.
    """

    def __init__(self, target: str, tls: TlsFiles | None, max_in_flight: int) -> None:
        """Raises SetupError if the TLS files cannot be used."""
        self._connection = ServiceConnection(target, InferenceServiceStub, None, tls)
        self._key = key_metadata(target=target, is_encrypted=tls is not None)
        self._places = Places(max_in_flight)
        self._closed_until_s: dict[str, float] = {}
        # Reasons why calls are not answered that the log has already; cleared by an answer.
        self._logged_reasons: set[str] = set()

    def closed_s(self) -> dict[str, float]:
        """Returns the tenants of which the gateway admits no more work now, with the seconds until it may."""
        now_s = time.monotonic()
        self._closed_until_s = {tenant: until_s for tenant, until_s in self._closed_until_s.items() if until_s > now_s}
        return {tenant: until_s - now_s for tenant, until_s in self._closed_until_s.items()}

    async def outcome(
        self, request: InferRequest, tenant: str, trace: SpanContext | None, limit_s: float, sent: Callable[[], None]
    ) -> InferOutcome:
        """Returns the outcome of a request, which is sent until the gateway has processed it, in at most `limit_s`
        seconds.

        Calls `sent` at each attempt.
        """
        request.priority = Priority.PRIORITY_BULK
        metadata = self.metadata(tenant, trace)
        try:
            return await self.admitted(lambda: self._infer(request, metadata, limit_s), tenant, sent)
        except NeuronpipeError as error:
            return InferOutcome(error=to_status(error))

    def metadata(self, tenant: str, trace: SpanContext | None) -> list[tuple[str, str]]:
        metadata = [*self._key, *([(ON_BEHALF, tenant)] if tenant else [])]
        return [*metadata, (TRACEPARENT, trace.traceparent)] if trace else metadata

    async def admitted(self, call: Callable[[], Awaitable[ResultT]], tenant: str, sent: Callable[[], None]) -> ResultT:
        """Makes a call until the gateway admits it, and returns its result. Raises the call's other errors."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if closed_s := self._closed_until_s.get(tenant, 0.0) - time.monotonic():
                await asyncio.sleep(max(0.0, closed_s))
            async with self._places.taken(tenant):
                if self._closed_until_s.get(tenant, 0.0) > time.monotonic():
                    continue  # another call of the tenant was refused meanwhile
                sent()
                try:
                    result = await call()
                except Overloaded as error:
                    self._close(tenant, error.retry_after_s)
                except (Unavailable, Cancelled, Unauthenticated) as error:
                    if isinstance(error, Unauthenticated):
                        log_warning("the gateway does not let this worker call for the tenant of a job", tenant=tenant)
                    elif error.message not in self._logged_reasons and len(self._logged_reasons) < _MAX_REASONS:
                        self._logged_reasons.add(error.message)
                        log_warning("the gateway does not answer for jobs; they wait", reason=error.message)
                    self._close(tenant, pause_s)
                    pause_s = min(_LAST_PAUSE_S, 2 * pause_s)
                else:
                    self._logged_reasons.clear()
                    return result

    async def close(self) -> None:
        await self._connection.close()

    def _close(self, tenant: str, seconds: float) -> None:
        until_s = time.monotonic() + seconds * random.uniform(1.0, 1.2)  # noqa: S311
        self._closed_until_s[tenant] = max(self._closed_until_s.get(tenant, 0.0), until_s)

    async def _infer(self, request: InferRequest, metadata: Sequence[tuple[str, str]], limit_s: float) -> InferOutcome:
        ends_s = time.monotonic() + limit_s
        with self._connection.use() as stub:
            try:
                response = await stub.Infer(request, timeout=limit_s, metadata=metadata)
                return InferOutcome(response=undamaged(response))
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, ends_s - time.monotonic()) from failure
