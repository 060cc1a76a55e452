"""A coalescer whose streams are written by hand.

What was sent is kept as it was when it was sent, and nothing is answered before the test says so, in whatever order, for whatever item.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, TokenizeItem, TokenizeOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.core.errors import Unavailable
from neuronpipe.gateway.coalescing import Coalescer

LIMIT_S = 10
BULK = Priority.PRIORITY_BULK
UNREACHABLE = r"^the tokenizer service cannot be reached$"


@dataclass
class Message:
    items: list[Any]
    abandoned: list[int]

    @property
    def names(self) -> list[str]:
        return [item.model for item in self.items]


class Wire:
    """The stream to one endpoint, and the endpoint itself."""

    serving: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.send_fault: Exception | None = None
        self.is_jammed = False
        self._said: asyncio.Queue[tuple[list[Any], list[int] | None] | Exception] = asyncio.Queue()

    async def send(self, items: Sequence[Any], abandoned_item_ids: Sequence[int]) -> None:
        if self.is_jammed:
            await asyncio.Event().wait()
        if self.send_fault:
            raise self.send_fault
        copies = [TokenizeItem.FromString(item.SerializeToString()) for item in items]
        self.messages.append(Message(copies, list(abandoned_item_ids)))

    async def receive(self) -> tuple[Sequence[Any], Sequence[int] | None]:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    @property
    def names(self) -> list[list[str]]:
        """The names of the items of each message."""
        return [message.names for message in self.messages]

    def id_of(self, name: str) -> int:
        (item_id,) = {item.context.item_id for message in self.messages for item in message.items if item.model == name}
        return int(item_id)

    async def say(self, *outcomes: Any) -> None:
        """One message: of no outcome where nothing is ready yet."""
        self._said.put_nowait((list(outcomes), None))
        await settled()

    async def drain(self, *names: str) -> None:
        """Reads no more, and still works on these."""
        self._said.put_nowait(([], [self.id_of(name) for name in names]))
        await settled()

    async def answer(self, *names: str) -> None:
        """One message with a value for each item."""
        await self.say(*(outcome(self.id_of(name), name) for name in names))

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

    async def connect(self) -> Wire:
        """A new endpoint."""
        wire = Wire()
        wire.serving = asyncio.create_task(self.coalescer.serve(wire))
        self.tasks.append(wire.serving)
        await settled()
        return wire

    async def ask(self, *names: str, **context: Any) -> list["asyncio.Task[Any]"]:
        """Brings items."""
        tasks = [asyncio.create_task(self.coalescer(item(name, **context))) for name in names]
        self.tasks += tasks
        await settled()
        return tasks


def item(name: str, text: str = "", **context: Any) -> TokenizeItem:
    input = TaskInput(text_classification=TextClassificationInput(text=text))
    return TokenizeItem(context=ItemContext(request_id=name, **context), model=name, input=input)


def value(name: str) -> EncodedInput:
    """A value that tells its item from others."""
    return EncodedInput(tokens=sum(name.encode()))


def outcome(item_id: int, name: str) -> TokenizeOutcome:
    return TokenizeOutcome(item_id=item_id, encoded=value(name))


async def settled() -> None:
    """Lets every task go as far as it can without time passing."""
    for _ in range(30):
        await asyncio.sleep(0)


async def values(tasks: "list[asyncio.Task[Any]]") -> list[Any]:
    return list(await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S))
