"""The stages' side of a stage's stream: items in, outcomes out, in the order in which they are ready (stages.proto)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.stages import internal_error
from neuronpipe.core.status import to_status
from neuronpipe.rpc.item_records import ItemRecords

# The messages of three stages alike, which protobuf's types cannot say.
_Message: TypeAlias = Any
_Stage: TypeAlias = Callable[[Any], Awaitable[_Message]]

# A message is answered after this long though nothing is ready: the gateway lets new items wait until then.
_ANSWER_AFTER_S = 0.001
# Backstop behind the admission of the gateways: items of one stream being worked on.
_MAX_ITEMS = 16_384


@dataclass(frozen=True, slots=True)
class StageRpc:
    """The rpc of a stage and its messages, found by the names that all of them follow."""

    method: MethodDescriptor
    # The field of an outcome that holds the value.
    value_field: str

    @property
    def service(self) -> ServiceDescriptor:
        """The gRPC service of the stage."""
        service: ServiceDescriptor = self.method.containing_service
        return service

    @property
    def path(self) -> str:
        """The rpc as HTTP/2 names it."""
        return f"/{self.service.full_name}/{self.method.name}"

    @property
    def request_class(self) -> type[_Message]:
        """Makes a message of items."""
        return GetMessageClass(self.method.input_type)

    @property
    def response_class(self) -> type[_Message]:
        """Makes a message of outcomes."""
        return GetMessageClass(self.method.output_type)

    @property
    def outcome_class(self) -> type[_Message]:
        """Makes an outcome."""
        outcome = self.method.output_type.fields_by_name["outcomes"].message_type
        assert outcome  # noqa: S101 (it is a list of messages)
        return GetMessageClass(outcome)


def _stage_rpc(service: str, method: str, value_field: str) -> StageRpc:
    return StageRpc(stages_pb2.DESCRIPTOR.services_by_name[service].methods_by_name[method], value_field)


TOKENIZE = _stage_rpc("TokenizerService", "Tokenize", "encoded")
EXECUTE = _stage_rpc("NeuronExecutorService", "Execute", "prediction")
POSTPROCESS = _stage_rpc("PostprocessorService", "Postprocess", "result")


def stage_method(
    rpc: StageRpc, stage: _Stage, telemetry: Telemetry | None = None, *, leaves_unavailable: bool = False
) -> Mapping[str, Callable[[AsyncIterator[_Message], object], AsyncIterator[_Message]]]:
    """The stage function as the method of its gRPC service, by its name.

    `leaves_unavailable`: the stage raises Unavailable only where its process is about to end. Then such items have no outcome: the gateway
    sends them to another process when the stream ends, or tells their callers where there is none.
    """
    records = ItemRecords(rpc.path.removeprefix("/"), telemetry or Telemetry())
    return {rpc.method.name: lambda requests, context: _Stream(rpc, stage, records, leaves_unavailable).answer(requests)}


class _Stream:
    """One gateway's stream."""

    def __init__(self, rpc: StageRpc, stage: _Stage, records: ItemRecords, leaves_unavailable: bool) -> None:
        self._stage = stage
        self._leaves_unavailable = leaves_unavailable
        self._records = records
        self._value_field = rpc.value_field
        self._outcome_class = rpc.outcome_class
        self._response_class = rpc.response_class
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: list[_Message] = []
        self._is_due = asyncio.Event()
        self._answer_at: asyncio.TimerHandle | None = None

    async def answer(self, requests: AsyncIterator[_Message]) -> AsyncIterator[_Message]:
        """Sends outcomes until the gateway ends the stream, or what reading it raises does; then what was read is still answered."""
        yield self._response_class()
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda task: self._is_due.set())
        is_draining = False
        try:
            while self._ready or self._running or not reading.done():
                await self._is_due.wait()
                self._is_due.clear()
                begins_draining = reading.done() and bool(self._running) and not is_draining
                if self._answer_at:
                    self._answer_at.cancel()
                    self._answer_at = None
                elif not self._ready and not begins_draining:
                    continue
                response, self._ready = self._response_class(outcomes=self._ready), []
                if begins_draining:
                    is_draining = True
                    response.draining.item_ids.extend(self._running)
                yield response
            await reading
        finally:
            reading.cancel()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(reading, *self._running.values(), return_exceptions=True)

    async def _read(self, requests: AsyncIterator[_Message]) -> None:
        loop = asyncio.get_running_loop()
        async for request in requests:
            for item_id in request.abandoned_item_ids:
                if task := self._running.pop(item_id, None):
                    task.cancel()
            for item in request.items:
                if len(self._running) >= _MAX_ITEMS:
                    self._finish(item, error=to_status(Overloaded(f"{_MAX_ITEMS} items in one stream, the limit", retry_after_s=1)))
                else:
                    self._running[item.context.item_id] = asyncio.create_task(self._run(item))
            if request.items and not self._answer_at:
                self._answer_at = loop.call_later(_ANSWER_AFTER_S, self._is_due.set)

    async def _run(self, item: _Message) -> None:
        try:
            with self._records.one_more(item) as record:
                value = record.value = await self._stage(item)
            self._finish(item, **{self._value_field: value})
        except NeuronpipeError as error:
            if self._leaves_unavailable and isinstance(error, Unavailable):
                self._is_due.set()  # the stream may end, for want of anything to wait for
            else:
                self._finish(item, error=to_status(error))
        except Exception as fault:
            self._finish(item, error=to_status(internal_error(fault, item.context.request_id, item.context.traceparent)))
        finally:
            self._running.pop(item.context.item_id, None)

    def _finish(self, item: _Message, **outcome: _Message) -> None:
        self._ready.append(self._outcome_class(item_id=item.context.item_id, **outcome))
        self._is_due.set()
