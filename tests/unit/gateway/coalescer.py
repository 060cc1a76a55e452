"""A coalescer whose streams are written by hand.

What was sent is kept as it was when it was sent, and nothing is answered before the test says so, in whatever order,
for whatever item.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.core.items import EncodedInput, ModelKey, StageItem, TokenizeItem, Work
from neuronpipe.core.packed import NO_TENSORS, Packed
from neuronpipe.core.streams import Outcome, Preparation, ProcessModels, StageResponse
from neuronpipe.gateway.coalescing import Coalescer
from tests.suite.waiting import settled

LIMIT_S = 10
BULK = Priority.PRIORITY_BULK
UNREACHABLE = r"^the tokenizer service cannot be reached$"
MODEL = ModelKey("m", 1)


@dataclass
class Message:
    items: list[tuple[int, StageItem]]
    abandoned: list[int]

    @property
    def names(self) -> list[str]:
        return [item.call.request_id for _, item in self.items]


class Wire:
    """The stream to one endpoint, and the endpoint itself."""

    serving: "asyncio.Task[None]"
    address = "ipv4:10.0.0.7:50051"

    def __init__(self, models: frozenset[ModelKey] = frozenset({MODEL})) -> None:
        self.models = ProcessModels(models)
        self.needed: list[frozenset[ModelKey]] = []
        self.retired = asyncio.Event()
        self.messages: list[Message] = []
        self.send_fault: Exception | None = None
        self.is_jammed = False
        # What tells it of needed models waits for this.
        self.takes_needed = asyncio.Event()
        self.takes_needed.set()
        # Items that cannot be sent, by their names.
        self.refuses: dict[str, NeuronpipeError] = {}
        self._said: asyncio.Queue[StageResponse | Exception] = asyncio.Queue()

    async def send(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int
    ) -> Sequence[Outcome]:
        assert size_bytes == sum(item.size_bytes for _, item in items)
        if self.is_jammed:
            await asyncio.Event().wait()
        if self.send_fault:
            raise self.send_fault
        sent = [(item_id, item) for item_id, item in items if item.call.request_id not in self.refuses]
        if sent or abandoned_item_ids:
            self.messages.append(Message(sent, list(abandoned_item_ids)))
        return [
            (item_id, self.refuses[item.call.request_id])
            for item_id, item in items
            if item.call.request_id in self.refuses
        ]

    async def tell_needed(self, models: frozenset[ModelKey]) -> None:
        await self.takes_needed.wait()
        self.needed.append(models)

    async def receive(self) -> StageResponse:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    @property
    def names(self) -> list[list[str]]:
        """The names of the items of each message."""
        return [message.names for message in self.messages]

    def id_of(self, name: str) -> int:
        (item_id,) = {
            item_id for message in self.messages for item_id, item in message.items if item.call.request_id == name
        }
        return item_id

    async def say(self, *outcomes: Outcome) -> None:
        """One message: of no outcome where nothing is ready yet."""
        self._said.put_nowait(StageResponse(outcomes))
        await settled()

    async def drain(self, *names: str) -> None:
        """Reads no more, and still works on these."""
        self._said.put_nowait(StageResponse(kept_item_ids=[self.id_of(name) for name in names]))
        await settled()

    async def announce(self, *models: ModelKey) -> None:
        """Has these models from now on."""
        self._said.put_nowait(StageResponse(models=ProcessModels(frozenset(models))))
        await settled()

    async def announce_bundles(self, digests: Mapping[ModelKey, str]) -> None:
        """Has the bundles with these digests from now on."""
        self._said.put_nowait(StageResponse(models=ProcessModels(frozenset(digests), digests=digests)))
        await settled()

    async def fail_to_load(self, model: ModelKey, problem: str, *models: ModelKey) -> None:
        """Has these models from now on, and could not load another."""
        self._said.put_nowait(StageResponse(models=ProcessModels(frozenset(models), problems={model: problem})))
        await settled()

    async def has_in_memory(self, *loaded: ModelKey, unloaded: Mapping[ModelKey, bool]) -> None:
        """Has these models in memory, and others not: whether they are being loaded."""
        models = ProcessModels(frozenset((*loaded, *unloaded)), unloaded=unloaded)
        self._said.put_nowait(StageResponse(models=models))
        await settled()

    async def prepares(self, prepared: Mapping[ModelKey, Preparation]) -> None:
        """Has these models, prepared so far."""
        self._said.put_nowait(StageResponse(models=ProcessModels(frozenset(prepared), prepared=prepared)))
        await settled()

    async def retire(self) -> None:
        """Its address is gone."""
        self.retired.set()
        await settled()

    async def answer(self, *names: str) -> None:
        """One message with a value for each item."""
        await self.say(*((self.id_of(name), value(name)) for name in names))

    async def fail(self, fault: Exception) -> None:
        self._said.put_nowait(fault)
        await settled()

    async def die(self) -> None:
        await self.fail(Unavailable("the stream has ended"))
        await asyncio.wait_for(self.serving, LIMIT_S)


@dataclass
class System:
    """A coalescer and what it said of the stage."""

    reports: list[bool] = field(default_factory=list)
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coalescer = Coalescer("tokenizer", self._report)

    async def _report(self, is_serving: bool) -> None:
        self.reports.append(is_serving)

    async def connect(self, *models: ModelKey) -> Wire:
        """A new endpoint with these models, or with the model of most items."""
        wire = Wire(frozenset(models or (MODEL,)))
        wire.serving = asyncio.create_task(self.coalescer.serve(wire))
        self.tasks.append(wire.serving)
        await settled()
        return wire

    async def ask(self, *names: str, **context: Any) -> list["asyncio.Task[Any]"]:
        """Brings items."""
        return await self.ask_for(MODEL, *names, **context)

    async def ask_for(self, model: ModelKey, *names: str, **context: Any) -> list["asyncio.Task[Any]"]:
        """Brings items for a model."""
        tasks = [asyncio.create_task(self.coalescer.send(item(name, model=model, **context))) for name in names]
        self.tasks += tasks
        await settled()
        return tasks


def item(
    name: str,
    data: bytes = b"",
    *,
    model: ModelKey = MODEL,
    cost_tokens: int = 0,
    held: HeldTime | None = None,
    **call: Any,
) -> TokenizeItem:
    """An item that is known by its request's id."""
    work = Work(cost_tokens=cost_tokens, held=held)
    return TokenizeItem(Call(name, **call), model, Packed(TaskInput, data=data), work=work)


def value(name: str) -> EncodedInput:
    """A value that tells its item from others."""
    return EncodedInput(NO_TENSORS, tokens=sum(name.encode()))


async def values(tasks: "list[asyncio.Task[Any]]") -> list[Any]:
    return list(await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S))
