"""A generator process: runs a generator, reports its progress to the parent, and returns the rows."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.measure.load.generator import Generator, Share
from neuronpipe.measure.load.inputs import generation_requests, make_requests
from neuronpipe.measure.load.prompts import Words
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import Rows, Tick

_CONNECT_LIMIT_S = 5.0


@dataclass(frozen=True)
class Assignment:
    """The parameters of a generator process."""

    request: LoadRequest
    task: str
    texts: Sequence[str]
    share: Share
    # What prompts of given lengths are made of.
    words: Words | None = None


@dataclass(frozen=True)
class Ready:
    """The process is connected and waits for the time to begin."""


@dataclass(frozen=True)
class Report:
    """The last message: every request of the process, every part of a generated text, and the share of a CPU core that
    it used.
    """

    rows: Rows
    parts: Rows
    cpu_share: float


Message: TypeAlias = Ready | Tick | Report
# The start time, on time.monotonic()'s clock, and then at most one None, which interrupts the run. End of file: the
# parent has died.
Order: TypeAlias = float | None
Orders: TypeAlias = "Connection[None, Order]"
Messages: TypeAlias = "Connection[Message, None]"


def work(orders: Orders, messages: Messages, assignment: Assignment) -> None:
    """The main function of a generator process."""
    # Without a parent the process ends.
    with contextlib.suppress(EOFError, ConnectionError), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_work(orders, messages, assignment))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:  # it is installed with the servers; the client does not need it
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _work(orders: Orders, messages: Messages, assignment: Assignment) -> None:
    request, task, texts = assignment.request, assignment.task, assignment.texts
    if request.generation:
        seed = assignment.share.seed
        requests = generation_requests(request, request.generation, task, texts, assignment.words, seed)
    else:
        requests = itertools.cycle(make_requests(request, task, texts))
    async with AsyncClient(request.target, timeout_s=None, retries=False, tls=request.tls) as client:
        # Connects. If the gateway is gone meanwhile, the requests fail and are recorded.
        with contextlib.suppress(NeuronpipeError, TimeoutError):
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await client.get_model(request.model, request.version)
        messages.send(Ready())
        begin_s = await asyncio.to_thread(orders.recv)
        if begin_s is None:
            return
        generator = Generator(client, requests, assignment.share, begin_s)
        has_ended = asyncio.Event()
        with _breaking_off(orders, generator):
            ticking = asyncio.create_task(_tick(messages, generator, begin_s, has_ended))
            try:
                cpu_share = await generator.run()
            finally:
                has_ended.set()
                await ticking
    messages.send(Report(generator.recorder.rows(), generator.recorder.parts(), cpu_share))


@contextlib.contextmanager
def _breaking_off(orders: Orders, generator: Generator) -> Iterator[None]:
    """Ends the run when anything arrives: an order, or the end of file."""
    loop = asyncio.get_running_loop()

    def break_off() -> None:
        loop.remove_reader(orders.fileno())
        generator.break_off()

    # uvloop makes the pipe that it reads non-blocking, so messages have another pipe.
    loop.add_reader(orders.fileno(), break_off)
    try:
        yield
    finally:
        loop.remove_reader(orders.fileno())


async def _tick(messages: Messages, generator: Generator, begin_s: float, has_ended: asyncio.Event) -> None:
    second = 0
    while not has_ended.is_set():
        second += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begin_s + second - time.monotonic())):
                await has_ended.wait()
                return
        # In a thread: a parent that reads slowly, such as one with a slow terminal, must not block the event loop.
        await asyncio.to_thread(messages.send, generator.recorder.tick(second, generator.in_flight))
