"""A generator process: sends requests at their times, records the outcome of each, and reports to the parent."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.measure.load.inputs import Words, generation_requests, make_requests
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import NOT_SENT, UNANSWERED, PartTimes, Recorder, Rows, Tick

_CHUNK = 1024


def poisson_arrivals_s(rate_per_s: float, duration_s: float, seed: Sequence[int]) -> Iterator[float]:
    """The times of a Poisson process from 0 up to `duration_s`: gaps are independent and exponential.

    Processes with different seeds are independent, so several of them together are a Poisson process of the summed
    rate.
    """
    random = np.random.default_rng(seed)
    last_s = 0.0
    while last_s < duration_s:
        times_s = last_s + np.cumsum(random.exponential(1 / rate_per_s, _CHUNK))
        last_s = float(times_s[-1])
        yield from times_s[times_s < duration_s].tolist()


def pace(times_s: Iterator[float], send: Callable[[list[float]], None], stop: threading.Event) -> None:
    """Calls `send` at each of the times, on time.monotonic()'s clock, until there are no more or `stop` is set.

    Blocks: give it a thread. Event loops round their timers to milliseconds, asyncio's up and uvloop's to the nearest
    one, which sends early. Measured as the median delay from the time asked for to the send, 1,000/s, 2 cores:
    asyncio.sleep 0.6 ms, a thread that wakes the loop 0.1 ms. Latencies of 2 ms cannot afford the former.
    """
    due_s: list[float] = []
    for time_s in times_s:
        wait_s = time_s - time.monotonic()
        if wait_s > 0:
            if due_s:
                send(due_s)
                due_s = []
                wait_s = time_s - time.monotonic()
            if stop.wait(max(0.0, wait_s)):
                return
        due_s.append(time_s)
    if due_s and not stop.is_set():
        send(due_s)


# How long an interrupted run waits for requests in flight.
_BROKEN_OFF_DRAIN_S = 1.0
# The shortest time over which the CPU share is computed.
_SHORTEST_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Share:
    """One process's share of a run. Times are in seconds; `rate_per_s` None means a closed loop of `callers`."""

    callers: int
    rate_per_s: float | None
    seed: Sequence[int]
    max_in_flight: int
    warm_up_s: float
    duration_s: float
    deadline_s: float | None
    drain_s: float
    # Texts are generated, and read as they come.
    is_generating: bool = False


class Generator:
    """Runs one share, once. Requests in flight at the end get `drain_s`; later ones are recorded as unanswered."""

    def __init__(self, client: AsyncClient, requests: Iterator[InferRequest], share: Share, begin_s: float) -> None:
        """`begin_s`: when the warm-up begins, on time.monotonic()'s clock. `requests` has no end."""
        self._client = client
        self._requests = requests
        self._share = share
        self._begin_s = begin_s
        self._measured_s = begin_s + share.warm_up_s
        self._end_s = self._measured_s + share.duration_s
        self._drain_s = share.drain_s
        self._drain: asyncio.Timeout | None = None
        self._ended = asyncio.Event()
        self._stop_pacing = threading.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        # Requests that were sent and are not answered yet.
        self.in_flight = 0
        self.recorder = Recorder(self._measured_s)

    async def run(self) -> float:
        """Returns the share of one CPU core that this process used while it was measured."""
        sending = asyncio.create_task(self._send())
        await self._reach(self._measured_s)
        cpu_began_s, began_s = time.process_time(), time.monotonic()
        await self._reach(self._end_s)
        measured_s = time.monotonic() - began_s
        # Meaningless for a run that is interrupted at once.
        cpu_share = (time.process_time() - cpu_began_s) / measured_s if measured_s > _SHORTEST_S else 0.0
        self._ended.set()
        await sending
        await self._drain_calls()
        if self._fault:
            raise self._fault
        return cpu_share

    def break_off(self) -> None:
        """Ends the run now. What is in flight gets a second."""
        self._stop_pacing.set()
        self._ended.set()
        self._drain_s = min(self._drain_s, _BROKEN_OFF_DRAIN_S)
        if self._drain:
            self._drain.reschedule(asyncio.get_running_loop().time() + self._drain_s)

    async def _reach(self, time_s: float) -> None:
        """Waits until a time, or until the run has ended.

        Never returns early, as uvloop's timers may by half a millisecond.
        """
        while not self._ended.is_set() and (left_s := time_s - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ended.wait()

    async def _send(self) -> None:
        if self._share.rate_per_s is None:
            await self._reach(self._begin_s)
            for _ in range(self._share.callers):
                self._start(self._call_in_turn())
            return
        duration_s = self._share.warm_up_s + self._share.duration_s
        arrivals_s = (
            self._begin_s + time_s
            for time_s in poisson_arrivals_s(self._share.rate_per_s, duration_s, self._share.seed)
        )
        loop = asyncio.get_running_loop()

        def send(due_s: list[float]) -> None:
            loop.call_soon_threadsafe(self._send_due, due_s)

        await asyncio.to_thread(pace, arrivals_s, send, self._stop_pacing)

    def _send_due(self, due_s: list[float]) -> None:
        for time_s in due_s:
            if len(self._calls) < self._share.max_in_flight:
                self._start(self._call(time_s))
            else:
                now_s = time.monotonic()
                self.recorder.add_error(time_s, now_s, now_s, NOT_SENT)

    async def _call_in_turn(self) -> None:
        while not self._ended.is_set():
            await self._call(time.monotonic())

    async def _call(self, due_s: float) -> None:
        sent_s = time.monotonic()
        # A caller counts from the time at which the request was due. A deadline that has passed already ends the call
        # at once.
        timeout_s = None if self._share.deadline_s is None else due_s + self._share.deadline_s - sent_s
        self.in_flight += 1
        times = PartTimes(due_s) if self._share.is_generating else None
        try:
            request = next(self._requests)
            if times:
                response = await self._read_along(request, timeout_s, times)
            else:
                response = await self._client.infer(request, timeout_s=timeout_s)
        except NeuronpipeError as error:
            self.recorder.add_error(due_s, sent_s, time.monotonic(), error.reason)
        except asyncio.CancelledError:
            self.recorder.add_error(due_s, sent_s, time.monotonic(), UNANSWERED)
            raise
        else:
            self.recorder.add_answer(due_s, sent_s, time.monotonic(), response, times)
        finally:
            self.in_flight -= 1

    async def _read_along(self, request: InferRequest, timeout_s: float | None, times: PartTimes) -> InferResponse:
        """The answer of a call that generates, once its parts are noted. One that comes as a whole is a part."""
        async with contextlib.aclosing(self._client.stream(request, timeout_s=timeout_s)) as events:
            async for event in events:
                if event.HasField("chunk"):
                    self.recorder.add_part(times, time.monotonic(), len(event.chunk.token_ids))
                elif event.HasField("response"):
                    if not times.tokens:
                        self.recorder.add_part(times, time.monotonic(), event.response.usage.generated_tokens)
                    return event.response
        raise Unavailable("the stream ended without a response")

    def _start(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (fault := task.exception()):
            self._fault = fault
            self.break_off()

    async def _drain_calls(self) -> None:
        if self._calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s) as self._drain:
                    await asyncio.wait(self._calls)
            self._drain = None
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)


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
