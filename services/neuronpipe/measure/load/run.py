"""Runs a load test: asks for the model, starts the generator processes, and collects their measurements."""

import asyncio
import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TypeAlias, cast

import numpy as np

from neuronpipe.api.v1.models_pb2 import Model
from neuronpipe.client import AsyncClient, Client
from neuronpipe.core.errors import InvalidInput, ModelNotFound, NeuronpipeError, SetupError
from neuronpipe.measure.load.generator import PART, ROW, ClientSender, LoadGenerator, LoadPart, Rows, Tick
from neuronpipe.measure.load.inputs import (
    Words,
    builtin_texts,
    check_task,
    count_words,
    generation_requests,
    make_requests,
    read_texts,
)
from neuronpipe.measure.load.report import LoadResult, compute_result, progress_line
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.platform.process.worker import Worker

Tell: TypeAlias = Callable[[str], None]

_FIND_LIMIT_S = 5.0
_CONNECT_LIMIT_S = 5.0
# The time from the start message to the first request; enough for the message to arrive.
_BEGIN_IN_S = 0.05
_POLL_S = 0.1
# Maximum number of requests in flight, over all processes: more than a gateway takes (in_flight.py), few enough for
# memory.
_MAX_IN_FLIGHT = 10_000
# The travel time of the answer to a call that its deadline has ended.
_DEADLINE_SLACK_S = 1.0


@dataclass(frozen=True)
class Assignment:
    """The parameters of a generator process. `words`: for prompts of given lengths."""

    request: LoadRequest
    task: str
    texts: Sequence[str]
    load: LoadPart
    words: Words | None


@dataclass(frozen=True)
class ProcessReport:
    """The last message of a process: its requests, the parts of generated texts, and its share of a CPU core."""

    rows: Rows
    parts: Rows
    cpu_share: float


# The process receives the start time, on time.monotonic()'s clock, and then at most one None, which interrupts the run,
# as the parent's death does. It sends a None when it is connected, progress each second, and the report.
Pipe: TypeAlias = "Connection[Tick | ProcessReport | None, float | None]"


def run_load(request: LoadRequest, tell: Tell = lambda line: None) -> LoadResult:
    """Runs a load test, and blocks until it is over. `tell` gets a line each second.

    Called in the main thread, the first SIGINT ends the run and returns the measurements so far; the next raises
    KeyboardInterrupt. A program that calls it must be importable (`if __name__ == "__main__"`): the generators are
    spawned processes. Raises SetupError if the target or the model does not answer.
    """
    texts = builtin_texts(request.seed) if request.texts is None else read_texts(request.texts)
    model = _find_model(request)
    if model.mask_token:  # at the start, where truncation does not drop it
        texts = [f"{model.mask_token} {text}" for text in texts]
    check_task(request, model.task)
    load = request.generation
    words = count_words(request, texts) if load and (load.prompt_tokens or load.shared_prefix_tokens) else None
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker.started(
                    work,
                    Assignment(request, model.task, _turned(texts, index, request.processes), load_part, words),
                    name=f"load generator {index + 1}",
                )
            )
            for index, load_part in enumerate(load_parts(request))
        ]
        for worker in workers:
            worker.receive()
        is_interrupted = stack.enter_context(_interrupts())
        begin_s = time.monotonic() + _BEGIN_IN_S
        for worker in workers:
            worker.send(begin_s)
        reports, broken_off_s = _gather(workers, is_interrupted, request, tell)
    measured_s = request.duration_s
    if broken_off_s is not None:
        measured_s = min(measured_s, max(0.0, broken_off_s - begin_s - request.warm_up_s))
    return compute_result(
        request,
        version=model.version,
        task=model.task,
        rows=np.concatenate([report.rows for report in reports]).astype(ROW, copy=False),
        parts=np.concatenate([report.parts for report in reports]).astype(PART, copy=False),
        cpu_shares=[report.cpu_share for report in reports],
        measured_s=measured_s,
        is_broken_off=broken_off_s is not None,
    )


def load_parts(request: LoadRequest) -> list[LoadPart]:
    """Splits the run evenly among its processes."""
    count = request.processes
    deadline_s = None if request.deadline_ms is None else request.deadline_ms / 1e3
    return [
        LoadPart(
            callers=request.callers // count + (index < request.callers % count),
            rate_per_s=None if request.rate_per_s is None else request.rate_per_s / count,
            seed=(request.seed, index),
            max_in_flight=_MAX_IN_FLIGHT // count,
            warm_up_s=request.warm_up_s,
            duration_s=request.duration_s,
            deadline_s=deadline_s,
            drain_s=request.drain_s if deadline_s is None else min(request.drain_s, deadline_s + _DEADLINE_SLACK_S),
        )
        for index in range(count)
    ]


def _turned(texts: Sequence[str], index: int, count: int) -> list[str]:
    """Returns the texts, rotated by a different number for each process.

    So the processes do not send the same texts at the same time.
    """
    first = index * len(texts) // count
    return [*texts[first:], *texts[:first]]


def _find_model(request: LoadRequest) -> Model:
    try:
        with Client(request.target, timeout_s=_FIND_LIMIT_S, retries=False, tls=request.tls) as client:
            return client.get_model(request.model, request.version)
    except ModelNotFound as error:
        raise SetupError(f"--model {request.model}: {error.message}") from error
    except InvalidInput as error:
        raise SetupError(f"--{error.field}: {error.problem}") from error
    except NeuronpipeError as error:
        message = (
            f"--target {request.target}: no gateway answers there within {_FIND_LIMIT_S:g} s: {error.reason}: "
            f"{error.message}"
        )
        raise SetupError(message) from error


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yields an event that the first SIGINT sets.

    An exception could interrupt the reading of a message; the second SIGINT raises an exception.
    """
    is_interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals cannot be handled there
        yield is_interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        is_interrupted.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _gather(
    workers: Sequence[Worker], is_interrupted: threading.Event, request: LoadRequest, tell: Tell
) -> tuple[list[ProcessReport], float | None]:
    """Returns the reports of all processes, in order, and the time at which the run was interrupted, if it was."""
    reports: dict[Worker, ProcessReport] = {}
    ticks: dict[int, list[Tick]] = {}
    broken_off_s: float | None = None
    while waiting := {worker.pipe: worker for worker in workers if worker not in reports}:
        if is_interrupted.is_set() and broken_off_s is None:
            broken_off_s = time.monotonic()
            for worker in workers:
                with contextlib.suppress(ConnectionError):  # the worker has reported and ended
                    worker.pipe.send(None)
        for pipe in wait([*waiting], _POLL_S):
            worker = waiting[cast(Connection, pipe)]
            message = worker.receive()
            if isinstance(message, ProcessReport):
                reports[worker] = message
            elif isinstance(message, Tick):
                second_ticks = ticks.setdefault(message.second, [])
                second_ticks.append(message)
                if len(second_ticks) == len(workers):
                    tell(progress_line(request, ticks.pop(message.second)))
    return [reports[worker] for worker in workers], broken_off_s


def work(pipe: Pipe, assignment: Assignment) -> None:
    """Runs a generator; the main function of its process."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:  # uvloop is installed with the servers; the client does not need it
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_work(pipe, assignment))


async def _work(pipe: Pipe, assignment: Assignment) -> None:
    request, task, texts = assignment.request, assignment.task, assignment.texts
    if request.generation:
        seed = assignment.load.seed
        requests = generation_requests(request, request.generation, task, texts, assignment.words, seed)
    else:
        requests = itertools.cycle(make_requests(request, task, texts))
    async with AsyncClient(request.target, timeout_s=None, retries=False, tls=request.tls) as client:
        # Connects. If the gateway is gone meanwhile, the requests fail and are recorded.
        with contextlib.suppress(NeuronpipeError, TimeoutError):
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await client.get_model(request.model, request.version)
        pipe.send(None)
        begin_s = await asyncio.to_thread(pipe.recv)
        if begin_s is None:
            return
        sender = ClientSender(client, is_generating=request.generation is not None)
        generator = LoadGenerator(sender, requests, assignment.load, begin_s)
        threading.Thread(target=_listen, args=(pipe, generator, asyncio.get_running_loop()), daemon=True).start()
        has_ended = asyncio.Event()
        ticking = asyncio.create_task(_tick(pipe, generator, begin_s, has_ended))
        try:
            cpu_share = await generator.run()
        finally:
            has_ended.set()
            await ticking
    pipe.send(ProcessReport(generator.recorder.rows(), generator.recorder.parts(), cpu_share))


def _listen(pipe: Pipe, generator: LoadGenerator, loop: asyncio.AbstractEventLoop) -> None:
    """Ends the run when anything arrives: an order, or the end of file."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
        loop.call_soon_threadsafe(generator.break_off)


async def _tick(pipe: Pipe, generator: LoadGenerator, begin_s: float, has_ended: asyncio.Event) -> None:
    second = 0
    while not has_ended.is_set():
        second += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begin_s + second - time.monotonic())):
                await has_ended.wait()
                return
        # In a thread: a parent that reads slowly, such as a slow terminal's, must not block the event loop.
        await asyncio.to_thread(pipe.send, generator.recorder.tick(second, generator.in_flight))
