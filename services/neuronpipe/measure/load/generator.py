"""Sends requests from one process and records the outcome of each."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.measure.load.arrivals import pace, poisson_arrivals_s
from neuronpipe.measure.load.samples import NOT_SENT, UNANSWERED, PartTimes, Recorder

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
