"""Runs a load test: asks for the model, starts the generator processes, and collects their measurements."""

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeAlias

import numpy as np

from neuronpipe.api.v1.models_pb2 import Model
from neuronpipe.client import Client
from neuronpipe.core.errors import InvalidInput, ModelNotFound, NeuronpipeError, SetupError
from neuronpipe.measure.load.generator import Assignment, Message, Order, Ready, Report, Share, work
from neuronpipe.measure.load.inputs import (
    Words,
    builtin_texts,
    count_words,
    generation_requests,
    make_requests,
    read_texts,
)
from neuronpipe.measure.load.report import LoadResult, compute_result, progress_line
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.samples import PART, ROW, Tick

Tell: TypeAlias = Callable[[str], None]

_FIND_LIMIT_S = 5.0
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 5.0
# From the start message to the first request; enough for the message to arrive.
_BEGIN_IN_S = 0.05
_POLL_S = 0.1
# Over all processes. More than a gateway takes (platform/process/in_flight.py), few enough to hold in memory.
_MAX_IN_FLIGHT = 10_000
# How long the answer to a call that ended by its deadline may travel.
_DEADLINE_SLACK_S = 1.0


@dataclass
class _Worker:
    process: SpawnProcess
    orders: "Connection[Order, None]"
    messages: "Connection[None, Message]"


def run_load(request: LoadRequest, tell: Tell = lambda line: None) -> LoadResult:
    """Runs a load test, and blocks until it is over. `tell` gets a line each second.

    Called in the main thread, the first SIGINT ends the run and returns what was measured so far; the next raises
    KeyboardInterrupt. A program that calls it must be importable (`if __name__ == "__main__"`): the generators are
    spawned processes. Raises SetupError if the target or the model does not answer.
    """
    texts = builtin_texts(request.seed) if request.texts is None else read_texts(request.texts)
    model = _find_model(request)
    if model.mask_token:  # at the beginning, where truncation does not drop it
        texts = [f"{model.mask_token} {text}" for text in texts]
    words = _check(request, model.task, texts)
    assignments = [
        Assignment(request, model.task, _turned(texts, index, request.processes), share, words)
        for index, share in enumerate(shares(request))
    ]
    with _started(assignments) as workers, _interrupts() as is_interrupted:
        measured_from_s = _begin(workers) + request.warm_up_s
        reports, broken_off_s = _gather(workers, is_interrupted, request, tell)
    measured_s = request.duration_s
    if broken_off_s is not None:
        measured_s = min(measured_s, max(0.0, broken_off_s - measured_from_s))
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


def shares(request: LoadRequest) -> list[Share]:
    """Splits the run evenly among its processes."""
    count = request.processes
    deadline_s = None if request.deadline_ms is None else request.deadline_ms / 1e3
    return [
        Share(
            callers=request.callers // count + (index < request.callers % count),
            rate_per_s=None if request.rate_per_s is None else request.rate_per_s / count,
            seed=(request.seed, index),
            max_in_flight=_MAX_IN_FLIGHT // count,
            warm_up_s=request.warm_up_s,
            duration_s=request.duration_s,
            deadline_s=deadline_s,
            drain_s=request.drain_s if deadline_s is None else min(request.drain_s, deadline_s + _DEADLINE_SLACK_S),
            is_generating=request.generation is not None,
        )
        for index in range(count)
    ]


def _check(request: LoadRequest, task: str, texts: Sequence[str]) -> Words | None:
    """What prompts are made of, where their lengths are given. Raises SetupError for a task that is not known, or that
    does not generate where it must.
    """
    load = request.generation
    if load is None:
        make_requests(request, task, texts[:1])
        return None
    generation_requests(request, load, task, texts, None, ())
    return count_words(request, texts) if load.prompt_tokens or load.shared_prefix_tokens else None


def _turned(texts: Sequence[str], index: int, count: int) -> list[str]:
    """The texts, rotated by a different number for each process.

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
def _started(assignments: Sequence[Assignment]) -> Iterator[list[_Worker]]:
    """Starts the generator processes, connected and waiting for the start; ends them with the block."""
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    try:
        for number, assignment in enumerate(assignments, 1):
            their_orders, orders = context.Pipe(duplex=False)
            messages, their_messages = context.Pipe(duplex=False)
            process = context.Process(
                target=work,
                args=(their_orders, their_messages, assignment),
                name=f"load generator {number}",
                daemon=True,
            )
            with _sigint_blocked():
                process.start()
            their_orders.close()
            their_messages.close()
            workers.append(_Worker(process, orders, messages))
        for worker in workers:
            if not worker.messages.poll(_START_LIMIT_S) or not isinstance(_receive(worker), Ready):
                raise RuntimeError(f"{worker.process.name} was not ready within {_START_LIMIT_S:g} s")
        yield workers
        for worker in workers:
            worker.process.join(_STOP_LIMIT_S)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.orders.close()
            worker.messages.close()


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Blocks SIGINT in processes that are started in the block.

    Ctrl-C reaches all processes of a terminal. This process tells the others when to end.
    """
    # Otherwise starting a process starts the tracker first, which unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that the first SIGINT sets.

    An exception could interrupt the reading of a message; the second SIGINT raises one.
    """
    is_interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # where signals cannot be handled
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


def _begin(workers: Sequence[_Worker]) -> float:
    begin_s = time.monotonic() + _BEGIN_IN_S
    for worker in workers:
        worker.orders.send(begin_s)
    return begin_s


def _gather(
    workers: Sequence[_Worker], is_interrupted: threading.Event, request: LoadRequest, tell: Tell
) -> tuple[list[Report], float | None]:
    """The reports of all processes, in order, and the time at which the run was interrupted, if it was."""
    reports: dict[int, Report] = {}
    ticks: dict[int, list[Tick]] = {}
    broken_off_s: float | None = None
    while len(reports) < len(workers):
        if is_interrupted.is_set() and broken_off_s is None:
            broken_off_s = time.monotonic()
            for worker in workers:
                with contextlib.suppress(ConnectionError):  # it has reported and ended
                    worker.orders.send(None)
        waiting = [(index, worker) for index, worker in enumerate(workers) if index not in reports]
        has_message = wait([worker.messages for _, worker in waiting], _POLL_S)
        for index, worker in waiting:
            message = _receive(worker) if worker.messages in has_message else None
            if isinstance(message, Report):
                reports[index] = message
            elif isinstance(message, Tick):
                of_second = ticks.setdefault(message.second, [])
                of_second.append(message)
                if len(of_second) == len(workers):
                    tell(progress_line(request, ticks.pop(message.second)))
    return [reports[index] for index in range(len(workers))], broken_off_s


def _receive(worker: _Worker) -> Message:
    try:
        return worker.messages.recv()
    except EOFError:
        worker.process.join(_STOP_LIMIT_S)
        raise RuntimeError(
            f"{worker.process.name} ended before its report, with exit code {worker.process.exitcode}"
        ) from None
