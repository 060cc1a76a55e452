"""The load generator with light senders in a process of its own: the same for echo servers, ours and other systems.

It sends bytes and keeps bytes: answers are read after the run. `neuronpipe load`, which reads them as they come, takes
more of the machine from the system that it measures, and would hide differences between systems.
"""

import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self, TypeAlias

import grpc
import numpy as np
import uvloop

from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.core.errors import Unavailable
from neuronpipe.measure.load.generator import (
    PART,
    LoadGenerator,
    LoadPart,
    PartTimes,
    Recorder,
    Rows,
    Sender,
    TaskSender,
)
from neuronpipe.measure.load.report import LoadResult, compute_result
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.run import load_parts
from neuronpipe.measure.machine import cpu_seconds
from neuronpipe.platform.process.worker import Worker
from neuronpipe.rpc.client import open_channel
from tests.bench.light_clients import CALL_LIMIT_S, GrpcConnection, HttpSender
from tests.bench.measurements import Measurement
from tests.bench.peers.in_process import pipeline_call

INFER = "/neuronpipe.api.v1.InferenceService/Infer"
ECHO = "/bench.Echo/Call"
# The senders of a system's requests: light ones, grpc.aio, and pipelines of transformers in the generator's process.
GRPC, HTTP, GRPCIO, PIPELINE, PIPELINE_BATCHES = "gRPC", "HTTP", "grpcio", "pipeline", "pipeline, batches"
WARM_UP_S = 0.5
# After an error: a caller that asks a server again at once takes the time of other callers.
_PAUSE_S = 0.001
_HOUR_S = 3600.0
_PARTS = ("total", "preprocess", "queue", "compute", "predict", "postprocess")
_PART_FIGURES = {"queue": "predict_queue", "compute": "predict_compute"}


@dataclass(frozen=True)
class System:
    """The place where a server answers calls of a method, or of a path of HTTP.

    `pids`: the server's processes; their children count, too. `ca`: the authority of its certificate; empty: no TLS.
    """

    name: str
    target: str
    method: str = INFER
    pids: tuple[int, ...] = ()
    client: str = GRPC
    ca: bytes = b""


class Answer(NamedTuple):
    """An answer, with the times of its request on the clock of time.monotonic()."""

    due_s: float
    sent_s: float
    back_s: float
    data: Any

    @property
    def latency_s(self) -> float:
        """The time from when the request was due."""
        return self.back_s - self.due_s


class KeptAnswers(Recorder):
    """Keeps answers as they are. `rows` reads them, if they are of our API."""

    def __init__(self, zero_s: float = 0.0, *, is_ours: bool = False) -> None:
        super().__init__(zero_s)
        self.answers: list[Answer] = []
        self._is_ours = is_ours

    def add_answer(
        self, due_s: float, sent_s: float, now_s: float, response: Any, times: PartTimes | None = None
    ) -> None:
        """Keeps an answer."""
        self.answers.append(Answer(due_s, sent_s, now_s, response))

    def rows(self) -> Rows:
        """A row for every request."""
        for due_s, sent_s, back_s, data in self.answers:
            response = InferResponse.FromString(data) if self._is_ours else InferResponse()
            super().add_answer(due_s, sent_s, back_s, response)
        return super().rows()

    @property
    def errors(self) -> int:
        """The number of requests without an answer."""
        return self._errors


def percentile_ms(answers: Sequence[Answer], percent: float) -> float:
    """A percentile of the latencies of answers."""
    return float(np.percentile([answer.latency_s * 1e3 for answer in answers], percent))


async def send_all(
    call: Callable[[Any], Awaitable[Any]],
    requests: Iterable[Any],
    *,
    callers: int = 1,
    seconds: float = _HOUR_S,
    rate_per_s: float | None = None,
    warm_up_s: float = 0.0,
    seed: int = 0,
) -> KeptAnswers:
    """Calls a coroutine function with requests, until there are no more or the seconds are over: callers in turn, or at
    random times at a rate. Answers to requests of the warm-up are left out.
    """
    began_s = time.monotonic()
    kept = KeptAnswers(began_s + warm_up_s)
    load_part = LoadPart(
        callers=callers, rate_per_s=rate_per_s, seed=(seed,), max_in_flight=1_000_000, warm_up_s=warm_up_s,
        duration_s=seconds, deadline_s=None, drain_s=_HOUR_S,
    )  # fmt: skip
    await LoadGenerator(TaskSender(lambda request, _: call(request)), iter(requests), load_part, began_s, kept).run()
    kept.answers = [answer for answer in kept.answers if answer.due_s >= began_s + warm_up_s]
    return kept


_Found: TypeAlias = tuple[LoadResult, dict[str, float], Sequence[bytes]]
# The system, the load, and the number of requests; 0: the requests come round and round.
_Order: TypeAlias = tuple[System, LoadRequest, int]


class LoadProcess:
    """The generator, as its process's parent sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @classmethod
    @contextmanager
    def started(cls, requests: Sequence[bytes]) -> Iterator[Self]:
        """A generator that sends these requests, round and round; ended with the block."""
        with Worker.started(_serve, list(requests), name="load generator") as worker:
            yield cls(worker)

    def measure(self, system: System, callers: int, seconds: float, section: str = "", round: int = 0) -> Measurement:
        """A turn of a closed loop, which blocks. Raises ConnectionError, and ProcessEnded where the generator ends."""
        load = LoadRequest(
            target=system.target, model="-", concurrency=callers, duration_s=seconds, warm_up_s=WARM_UP_S
        )
        result, figures, _ = self._order(system, load)
        return Measurement.of(result, section, system.name, callers, round, figures)

    def answers(self, system: System, callers: int, count: int) -> Sequence[bytes]:
        """The answers to the first requests, in the order in which they came. Raises ConnectionError."""
        load = LoadRequest(target=system.target, model="-", concurrency=callers, duration_s=_HOUR_S, warm_up_s=0)
        result, _, answers = self._order(system, load, count)
        if len(answers) != count:
            raise ConnectionError(f"{system.name}: of {count} calls some failed: {result.errors}")
        return answers

    def offer(self, system: System, rate_per_s: float, seconds: float, deadline_ms: float, seed: int) -> LoadResult:
        """Calls that arrive at random, whether or not earlier ones are answered. Raises ConnectionError."""
        load = LoadRequest(
            target=system.target, model="-", rate_per_s=rate_per_s, duration_s=seconds, warm_up_s=0,
            deadline_ms=deadline_ms, seed=seed,
        )  # fmt: skip
        return self._order(system, load)[0]

    def _order(self, system: System, load: LoadRequest, count: int = 0) -> _Found:
        self._worker.send((system, load, count))
        found: _Found | Exception = self._worker.receive()
        if isinstance(found, Exception):
            raise found
        return found


def _serve(pipe: "Connection[_Found | Exception, _Order]", requests: Sequence[bytes]) -> None:
    while True:
        order = pipe.recv()
        try:
            pipe.send(uvloop.run(_run(requests, *order)))
        except OSError as error:
            pipe.send(ConnectionError(str(error) or f"no answer within {CALL_LIMIT_S:g} s"))


async def _run(requests: Sequence[bytes], system: System, load: LoadRequest, count: int) -> _Found:
    (load_part,) = load_parts(load)
    async with _sender(system, load) as sender:
        began_s = time.monotonic()
        recorder = KeptAnswers(began_s + load.warm_up_s, is_ours=system.method == INFER)
        sent = iter(requests[:count]) if count else itertools.cycle(requests)
        generator = LoadGenerator(sender, sent, replace(load_part, pause_s=_PAUSE_S), began_s, recorder)
        server_began_s, own_began_s = cpu_seconds(system.pids), time.process_time()
        # It would look through all answers again and again.
        gc.disable()
        cpu_share = await generator.run()
        gc.enable()
        own_s, server_s = time.process_time() - own_began_s, cpu_seconds(system.pids) - server_began_s
    rows = recorder.rows()
    result = compute_result(
        load, version="", task="", rows=rows, parts=np.empty(0, PART), cpu_shares=[cpu_share],
        measured_s=load.duration_s, is_broken_off=False,
    )  # fmt: skip
    figures = {
        "answered": float(len(recorder.answers)),
        "generator_cpu": cpu_share,
        "generator_cpu_us": own_s / max(1, len(rows)) * 1e6,
    }
    if system.pids:
        figures["server_cpu_us"] = server_s / max(1, len(rows)) * 1e6
    if system.method == INFER and result.answers > 1:
        figures |= _answer_figures(result, rows)
    return result, figures, [answer.data for answer in recorder.answers] if count else []


def _answer_figures(result: LoadResult, rows: Rows) -> dict[str, float]:
    answers = rows[(rows["outcome"] == 0) & (rows["due_s"] >= 0)]
    covered = sum(answers[f"{part}_ms"] for part in ("preprocess", "predict", "postprocess")) / answers["total_ms"]
    return {
        "covered": float(np.median(covered)),
        "covered_least": float(covered.min()),
        "tokens_per_answer": float(answers["tokens"].mean()),
        "padding": result.padding_ratio or 0.0,
        "batch_size": result.batch_size_mean or 0.0,
        **{f"{_PART_FIGURES.get(part, part)}_p50_ms": float(np.median(answers[f"{part}_ms"])) for part in _PARTS},
    }


@asynccontextmanager
async def _sender(system: System, load: LoadRequest) -> AsyncIterator[Sender]:
    """The sender of a system's requests. The generator closes it. Raises OSError."""
    if system.client == HTTP:
        yield await HttpSender.open(system.target, system.method, load.callers)
    elif system.client == GRPC:
        limit_s = (load.deadline_ms or CALL_LIMIT_S * 1e3) / 1e3
        yield await GrpcConnection.open(system.target, system.method, system.ca, limit_s)
    elif system.client in (PIPELINE, PIPELINE_BATCHES):
        async with pipeline_call(system.target, is_batching=system.client == PIPELINE_BATCHES) as call_pipeline:
            yield TaskSender(call_pipeline)
    else:
        async with open_channel(system.target) as channel:
            method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(system.method)

            async def call(request: bytes, _: object) -> bytes:
                try:
                    return await method(request, timeout=CALL_LIMIT_S)
                except grpc.aio.AioRpcError as error:
                    raise Unavailable(error.details() or "") from error

            yield TaskSender(call)
