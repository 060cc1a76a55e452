"""Sends requests at their times and records the outcome of each: a row of ROW, in the order in which they ended.

A generated text also has a row of PART for each of its parts, in the order in which they came. Senders make the calls:
ClientSender with the client, TaskSender with any coroutine function.
"""

import asyncio
import contextlib
import math
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.core.status import CODES

OK = "OK"
NOT_SENT = "NOT_SENT"
UNANSWERED = "UNANSWERED"
# The outcomes of a request: an answer, the reason of a NeuronpipeError, or an outcome that only the generator knows.
OUTCOMES = (OK, *(kind.reason for kind in CODES), NOT_SENT, UNANSWERED)

# Times in seconds count from the start of measuring: requests of the warm-up have negative times.
ROW = np.dtype(
    [
        ("due_s", "<f8"),  # when the request was due
        ("latency_s", "<f8"),  # from due_s to the answer or the error
        ("lag_s", "<f4"),  # from due_s until the request was sent
        ("outcome", "<u4"),  # index into OUTCOMES
        ("total_ms", "<f4"),  # the times from here on are fields of StageTimings
        ("preprocess_ms", "<f4"),
        ("predict_ms", "<f4"),
        ("queue_ms", "<f4"),
        ("compute_ms", "<f4"),
        ("postprocess_ms", "<f4"),
        ("tokens", "<u4"),  # this and the following as in Usage
        ("padded_tokens", "<u4"),
        ("batch_size", "<u4"),
        ("cached_tokens", "<u4"),
        ("first_token_s", "<f4"),  # from due_s to the first token; this and the following as in PartTimes
        ("token_s", "<f4"),
        ("longest_gap_s", "<f4"),
        ("output_tokens", "<u4"),
    ]
)
# A part of a generated text, as it came.
PART = np.dtype(
    [
        ("back_s", "<f8"),  # when the part came
        ("gap_s", "<f4"),  # since the part before; NaN for the first part
        ("tokens", "<u4"),
    ]
)


def _packer(row: np.dtype[np.void]) -> Callable[..., bytes]:
    """Returns the function that packs the values of a row. NumPy and struct have the same letters for types."""
    letters = [field[0].char for field in (row.fields or {}).values()]
    return struct.Struct("<" + "".join(letters)).pack


_pack_row, _pack_part = _packer(ROW), _packer(PART)
_NO_ANSWER = (0,) * 10
_NO_PARTS = (0, 0, 0, 0)

Rows = NDArray[np.void]


@dataclass
class PartTimes:
    """The times of the parts of one text, in seconds, on the clock of the recorder."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    first_tokens: int = 0
    tokens: int = 0

    def add(self, now_s: float, tokens: int) -> float:
        """Records a part. Returns the time since the part before; NaN for the first part."""
        gap_s = now_s - self.last_s if self.tokens else math.nan
        if self.tokens:
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        else:
            self.first_s, self.first_tokens = now_s, tokens
        self.tokens += tokens
        self.last_s = now_s
        return gap_s

    @property
    def token_s(self) -> float:
        """The mean time between two tokens after the first part; 0 for a text that came as a whole."""
        later = self.tokens - self.first_tokens
        return (self.last_s - self.first_s) / later if later else 0.0


@dataclass(frozen=True)
class Tick:
    """The progress since the last tick."""

    second: int
    latencies_ms: Sequence[float]
    errors: int
    in_flight: int


class Recorder:
    """Keeps a row for every request of one process."""

    def __init__(self, zero_s: float) -> None:
        """`zero_s`: the start of measuring, on the clock of the times that the other methods take."""
        self._zero_s = zero_s
        self._rows, self._parts = bytearray(), bytearray()
        self._latencies_ms: list[float] = []
        self._errors = 0

    def add_part(self, times: PartTimes, now_s: float, tokens: int) -> None:
        """Records a part of a generated text."""
        self._parts += _pack_part(now_s - self._zero_s, times.add(now_s, tokens), tokens)

    def add_answer(
        self, due_s: float, sent_s: float, now_s: float, response: InferResponse, times: PartTimes | None = None
    ) -> None:
        """Records an answer. `times`: the times of a text that was read in parts."""
        timings, usage = response.timings, response.usage
        self._rows += _pack_row(
            *(due_s - self._zero_s, now_s - due_s, sent_s - due_s, 0),
            *(timings.total_ns / 1e6, timings.preprocess_ns / 1e6, timings.predict_ns / 1e6),
            *(timings.predict_queue_ns / 1e6, timings.predict_compute_ns / 1e6, timings.postprocess_ns / 1e6),
            *(usage.tokens, usage.padded_tokens, usage.batch_size, usage.cached_tokens),
            *((times.first_s - due_s, times.token_s, times.longest_gap_s, times.tokens) if times else _NO_PARTS),
        )
        self._latencies_ms.append((now_s - due_s) * 1e3)

    def add_error(self, due_s: float, sent_s: float, now_s: float, outcome: str) -> None:
        """Records a request that ended without an answer, with one of OUTCOMES."""
        times = (due_s - self._zero_s, now_s - due_s, sent_s - due_s)
        self._rows += _pack_row(*times, OUTCOMES.index(outcome), *_NO_ANSWER, *_NO_PARTS)
        self._errors += 1

    def tick(self, second: int, in_flight: int) -> Tick:
        """Returns the progress since the last call."""
        tick = Tick(second, self._latencies_ms, self._errors, in_flight)
        self._latencies_ms, self._errors = [], 0
        return tick

    def rows(self) -> Rows:
        return np.frombuffer(bytes(self._rows), ROW)

    def parts(self) -> Rows:
        """Returns all parts of generated texts."""
        return np.frombuffer(bytes(self._parts), PART)


_CHUNK = 1024


def poisson_arrivals_s(rate_per_s: float, duration_s: float, seed: Sequence[int]) -> Iterator[float]:
    """Yields the times of a Poisson process from 0 up to `duration_s`: gaps are independent and exponential.

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

    Blocks: call it in a thread. Event loops round their timers to milliseconds, asyncio up and uvloop to the nearest
    millisecond, so that it sends early. Measured as the median delay from the due time to the send, 1,000/s, 2 cores:
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


@dataclass(slots=True, eq=False)
class Sending:
    """A request on its way, as its sender sees it. `deadline_s` counts from `due_s`."""

    due_s: float
    sent_s: float
    deadline_s: float | None
    recorder: Recorder
    # Ends the request with one of OUTCOMES and the answer.
    end: Callable[["Sending", str, Any], None]
    # Ends the run with an error that is not a request's.
    fail: Callable[[BaseException], None]
    times: PartTimes | None = None

    @property
    def left_s(self) -> float | None:
        """The time until the deadline, which has passed if negative; None without a deadline."""
        return None if self.deadline_s is None else self.due_s + self.deadline_s - time.monotonic()


class Sender(Protocol):
    """The way in which requests reach a system. A sender calls `end` of each request once, unless it is closed."""

    def send(self, request: Any, sending: Sending) -> None:
        """Begins a request."""

    def flush(self) -> None:
        """Sends the requests that were begun. Does nothing where they begin by themselves."""
        return

    async def close(self) -> None:
        """Gives up all requests on their way."""


class TaskSender(Sender):
    """Sends each request with a coroutine function, in a task."""

    def __init__(self, call: Callable[[Any, Sending], Awaitable[Any]]) -> None:
        self._call = call
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, request: Any, sending: Sending) -> None:
        """Begins a request."""
        task = asyncio.create_task(self._run(request, sending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up all requests on their way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, request: Any, sending: Sending) -> None:
        sending.sent_s = time.monotonic()
        try:
            answer = await self._call(request, sending)
        except NeuronpipeError as error:
            sending.end(sending, error.reason, None)
        except Exception as fault:
            sending.fail(fault)
        else:
            sending.end(sending, OK, answer)


class ClientSender(TaskSender):
    """Sends with the client. `is_generating`: texts are generated, and read in parts."""

    def __init__(self, client: AsyncClient, *, is_generating: bool) -> None:
        self._client = client
        super().__init__(self._read_along if is_generating else self._infer)

    async def _infer(self, request: InferRequest, sending: Sending) -> InferResponse:
        return await self._client.infer(request, timeout_s=sending.left_s)

    async def _read_along(self, request: InferRequest, sending: Sending) -> InferResponse:
        """Reads the parts of a generated text, and returns the answer. A text that comes as a whole is one part."""
        times = sending.times = PartTimes(sending.due_s)
        async with contextlib.aclosing(self._client.stream(request, timeout_s=sending.left_s)) as events:
            async for event in events:
                if event.HasField("chunk"):
                    sending.recorder.add_part(times, time.monotonic(), len(event.chunk.token_ids))
                elif event.HasField("response"):
                    if not times.tokens:
                        sending.recorder.add_part(times, time.monotonic(), event.response.usage.generated_tokens)
                    return event.response
        raise Unavailable("the stream ended without a response")


# The time that requests in flight get after an interruption.
_BROKEN_OFF_DRAIN_S = 1.0
# The shortest time over which the CPU share is computed.
_SHORTEST_S = 0.1


@dataclass(frozen=True, kw_only=True)
class LoadPart:
    """The part of a load that one process makes. Times are in seconds.

    `rate_per_s`: None for a closed loop of `callers`. `pause_s`: in a closed loop, a caller's wait after an error.
    """

    callers: int
    rate_per_s: float | None
    seed: Sequence[int]
    max_in_flight: int
    warm_up_s: float
    duration_s: float
    deadline_s: float | None
    drain_s: float
    pause_s: float = 0.0


class LoadGenerator:
    """Makes one load, once. Requests in flight at the end get `drain_s`; later answers are recorded as unanswered."""

    def __init__(
        self, sender: Sender, requests: Iterator[Any], load: LoadPart, begin_s: float, recorder: Recorder | None = None
    ) -> None:
        """`begin_s`: the start of the warm-up, on time.monotonic()'s clock. A run also ends with its `requests`."""
        self._sender = sender
        self._requests = requests
        self._load = load
        self._begin_s = begin_s
        self._measured_s = begin_s + load.warm_up_s
        self._end_s = self._measured_s + load.duration_s
        self._drain_s = load.drain_s
        self._drain: asyncio.Timeout | None = None
        self._ended, self._idle = asyncio.Event(), asyncio.Event()
        self._stop_pacing = threading.Event()
        self._sent: set[Sending] = set()
        self._fault: BaseException | None = None
        self.recorder = recorder or Recorder(self._measured_s)

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and are not answered yet."""
        return len(self._sent)

    async def run(self) -> float:
        """Makes the load, and returns the share of one CPU core that this process used while measuring."""
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
        """Ends the run now. Requests in flight get a second."""
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
        load = self._load
        if load.rate_per_s is None:
            await self._reach(self._begin_s)
            self._send_due([time.monotonic()] * load.callers)
            return
        duration_s = load.warm_up_s + load.duration_s
        arrivals_s = (self._begin_s + time_s for time_s in poisson_arrivals_s(load.rate_per_s, duration_s, load.seed))
        loop = asyncio.get_running_loop()

        def send(due_s: list[float]) -> None:
            loop.call_soon_threadsafe(self._send_due, due_s)

        await asyncio.to_thread(pace, arrivals_s, send, self._stop_pacing)

    def _send_due(self, times_s: list[float]) -> None:
        for due_s in times_s:
            self._start(due_s)
        self._sender.flush()

    def _start(self, due_s: float) -> None:
        now_s = time.monotonic()
        if len(self._sent) >= self._load.max_in_flight:
            self.recorder.add_error(due_s, now_s, now_s, NOT_SENT)
        elif (request := next(self._requests, None)) is not None:
            sending = Sending(due_s, now_s, self._load.deadline_s, self.recorder, self._end, self._fail)
            self._sent.add(sending)
            self._sender.send(request, sending)
        elif not self._sent:
            self.break_off()

    def _end(self, sending: Sending, outcome: str, answer: Any) -> None:
        if sending not in self._sent:  # recorded as unanswered
            return
        self._sent.remove(sending)
        now_s = time.monotonic()
        if outcome == OK:
            self.recorder.add_answer(sending.due_s, sending.sent_s, now_s, answer, sending.times)
        else:
            self.recorder.add_error(sending.due_s, sending.sent_s, now_s, outcome)
        if not self._sent and self._drain:
            self._idle.set()
        if self._load.rate_per_s is None and not self._ended.is_set():
            if outcome == OK or not self._load.pause_s:
                self._start(now_s)
            else:
                asyncio.get_running_loop().call_later(self._load.pause_s, self._resume)

    def _resume(self) -> None:
        if not self._ended.is_set():
            self._send_due([time.monotonic()])

    def _fail(self, fault: BaseException) -> None:
        self._fault = self._fault or fault
        self.break_off()

    async def _drain_calls(self) -> None:
        if self._sent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s) as self._drain:
                    await self._idle.wait()
            self._drain = None
        now_s = time.monotonic()
        for sending in self._sent:
            self.recorder.add_error(sending.due_s, sending.sent_s, now_s, UNANSWERED)
        self._sent.clear()
        await self._sender.close()
