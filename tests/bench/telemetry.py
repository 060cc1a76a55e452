"""What traces and metrics cost, what the stages' spans cover, and whether spans get lost."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from neuronpipe.platform.process.worker import Worker
from neuronpipe.rpc.client import open_channel
from tests.bench.load import LoadProcess, System, send_all
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, find_repository, make_request, serving_all, serving_four, take_turns

SECTION = "telemetry"
KINDS = ("fake", "float32")
CALLERS = 32
COVERAGE_CALLERS = (1, 64)
OFF, ONE_PERCENT, EVERYTHING = "off", "1 %", "100 %"
LOST = "spans of 10,000 requests"
_REQUESTS = 10_000
# The spans of a request in its trace.
_SPANS = {ALL: 6, FOUR: 9}
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_LAST_SPANS_LIMIT_S = 30.0
_SERVING = {ALL: serving_all, FOUR: serving_four}


def measure_telemetry(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """Without a collector, with 1 % of the requests, with all; the systems of a kind take turns. In the end, spans are
    counted.
    """
    requests = [make_request(text) for text in texts]
    with running_sink() as sink, LoadProcess.started(requests) as loop:
        for kind in KINDS:
            with ExitStack() as stack:
                repository, turns = find_repository(kind), list[tuple[int, System]]()
                for shape, how in itertools.product((ALL, FOUR), (OFF, ONE_PERCENT, EVERYTHING)):
                    variables = _variables(how, sink.endpoint)
                    serving = _SERVING[shape](repository, f"{shape}, {kind}, {how}", environment=variables)
                    system = stack.enter_context(serving)
                    every = (CALLERS, *(COVERAGE_CALLERS if how == EVERYTHING else ()))
                    turns += [(callers, system) for callers in every]
                yield from take_turns(SECTION, loop, turns, range(rounds), seconds)
        for shape in (ALL, FOUR):
            sink.messages(clears=True)
            with _SERVING[shape](
                find_repository("fake"), LOST, environment=_variables(EVERYTHING, sink.endpoint)
            ) as lossless:
                began_s = time.monotonic()
                asyncio.run(_ask(lossless, requests))
                took_s = time.monotonic() - began_s
                complete, spans = _complete_traces(sink, _SPANS[shape])
            yield Measurement(
                section=SECTION,
                system=f"{LOST}, {shape}",
                callers=CALLERS,
                round=0,
                throughput_per_s=_REQUESTS / took_s,
                figures={"requests": _REQUESTS, "complete_traces": complete, "spans": spans},
            )


def _variables(how: str, endpoint: str) -> Mapping[str, str]:
    if how == OFF:
        return {}
    ratio = "0.01" if how == ONE_PERCENT else "1"
    return {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER_ARG": ratio,
        "OTEL_METRICS_EXPORTER": "none",
    }


async def _ask(system: System, requests: Sequence[bytes]) -> None:
    async with open_channel(system.target) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(system.method)
        await send_all(call, itertools.islice(itertools.cycle(requests), _REQUESTS), callers=CALLERS)


def _complete_traces(sink: "Sink", spans_of_a_request: int) -> tuple[int, int]:
    """How many requests have all their spans, once no more come, and how many spans there are in all."""
    deadline_s = time.monotonic() + _LAST_SPANS_LIMIT_S
    while True:
        counts = Counter[bytes]()
        for message in sink.messages():
            for resource in ExportTraceServiceRequest.FromString(message).resource_spans:
                for scope in resource.scope_spans:
                    counts.update(span.trace_id for span in scope.spans)
        complete = sum(count == spans_of_a_request for count in counts.values())
        if complete >= _REQUESTS or time.monotonic() >= deadline_s:
            return complete, sum(counts.values())
        time.sleep(1)


class Sink:
    """A collector in a process of its own that keeps what it gets unread: one that reads would take the machine from
    the servers.
    """

    def __init__(self, worker: Worker) -> None:
        self.endpoint: str = worker.receive()
        self._worker = worker

    def messages(self, *, clears: bool = False) -> list[bytes]:
        """What came since it was cleared. `clears`: it is forgotten now."""
        self._worker.send(clears)
        messages: list[bytes] = self._worker.receive()
        return messages


@contextmanager
def running_sink() -> Iterator[Sink]:
    """A sink; ended with the block."""
    with Worker.started(_serve_sink, name="collector") as worker:
        yield Sink(worker)


def _serve_sink(pipe: "Connection[list[bytes] | str, bool]") -> None:
    kept: list[bytes] = []

    def export(message: bytes, context: grpc.ServicerContext) -> bytes:
        kept.append(message)
        return b""

    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    service, method = _EXPORT.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"http://127.0.0.1:{port}")
    while True:
        clears = pipe.recv()
        pipe.send(list(kept))
        if clears:
            kept.clear()
