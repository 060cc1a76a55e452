"""What arrives at a real OTLP receiver from four processes: complete, consistent, and the same numbers as in the
responses.
"""

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest, InferStreamRequest
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.core.names import Attributes, Events, Spans
from neuronpipe.rpc.client import open_channel
from tests.callers.requests import answer, classify, embed
from tests.callers.traced import PARENTS, TREE, Answered, ask_sampled
from tests.servers.collector import Collector, Received, grpc_collector

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

SERVER_KIND = 2
_SPANS_OF_A_REQUEST = sum(map(len, TREE.values()))
# Two processes read the distance of the machine's wall clock from its monotonic one to within this.
_CLOCKS_NS = 200_000
_TRIES = 5
_QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_METRIC_EXPORT_INTERVAL": "200"}


@dataclass(frozen=True)
class Observed:
    """Four processes that export to a collector."""

    collector: Collector
    processes: Mapping[str, ServiceProcess]

    @property
    def target(self) -> str:
        return self.processes["gateway"].target


@contextmanager
def observed(repository: Path, collector: Collector, **variables: str) -> Iterator[Observed]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **_QUICK, **variables}
    with four_processes(repository, environment=environment) as processes:
        yield Observed(collector, processes)


@pytest.fixture(scope="module")
def exporting(fake_repository: Path) -> Iterator[Observed]:
    """Samples what its caller samples, and nothing else."""
    with (
        grpc_collector() as collector,
        observed(fake_repository, collector, OTEL_TRACES_SAMPLER="parentbased_always_off") as system,
    ):
        yield system


def _question(windows: int) -> InferRequest:
    """A context of so many windows, which are a sequence each."""
    return answer("who sat on the mat?", "the cat sat on the mat and looked at the dog " * (25 * windows))


def _wait_for_traces(collector: Collector, answered: Sequence[Answered], count: int = _SPANS_OF_A_REQUEST) -> None:
    wanted = {call.trace_id for call in answered}

    def is_there(found: Collector) -> bool:
        spans = [span for span in found.spans if span.trace_id in wanted]
        batches = {key for span in spans for key in span.links}
        return len(spans) >= count * len(answered) and batches <= {span.key for span in found.spans}

    collector.wait_until(is_there)


def _by_name(spans: Sequence[Received]) -> dict[str, Received]:
    return {span.name: span for span in spans}


async def test_every_sampled_request_has_all_its_spans_with_the_right_parents(exporting: Observed) -> None:
    answered = await ask_sampled(exporting.target, [embed(f"text {number}") for number in range(64)])
    _wait_for_traces(exporting.collector, answered)
    for call in answered:
        spans = exporting.collector.trace(call.trace_id)
        assert {service: sorted(span.name for span in spans if span.service == service) for service in TREE} == {
            service: sorted(names) for service, names in TREE.items()
        }
        by_name = _by_name(spans)
        assert by_name[Spans.INFER].parent_id == call.parent_id
        for name, parent in PARENTS.items():
            assert by_name[name].parent_id == by_name[parent].span_id, name
            assert by_name[name].started_ns >= by_name[parent].started_ns - _CLOCKS_NS, name
            assert by_name[name].ended_ns <= by_name[parent].ended_ns + _CLOCKS_NS, name


async def test_batches_and_their_members_link_to_each_other(exporting: Observed) -> None:
    texts = ["word " * (1 + number % 7) for number in range(64)]
    answered = await ask_sampled(exporting.target, [embed(text) for text in texts])
    _wait_for_traces(exporting.collector, answered)
    by_key = {span.key: span for span in exporting.collector.spans}
    computes = [_by_name(exporting.collector.trace(call.trace_id))[Spans.COMPUTE] for call in answered]
    sizes: set[int] = set()
    for call, compute in zip(answered, computes, strict=True):
        ((batch_key, of_rows),) = compute.links.items()
        batch = by_key[batch_key]
        assert (batch.name, batch.parent_id, batch.service) == (Spans.BATCH, "", "neuron-executor")
        assert batch.links[compute.key] == of_rows  # row, tokens and bucket, the same from both ends
        assert of_rows[0][Attributes.TOKENS] == call.response.usage.tokens
        assert of_rows[0][Attributes.BUCKET_TOKENS] == call.response.usage.bucket_tokens
        assert (batch.started_ns, batch.ended_ns) == (compute.started_ns, compute.ended_ns)
        assert batch.attributes[Attributes.BATCH_SIZE] == call.response.usage.batch_size
        sizes.add(call.response.usage.batch_size)
        rows = [row[Attributes.ROW] for links in batch.links.values() for row in links]
        assert sorted(rows) == list(range(call.response.usage.batch_size))  # all members are sampled
    assert max(sizes) > 1, "nothing was batched, so that this test showed nothing"


async def test_a_request_of_several_sequences_links_each_row(exporting: Observed) -> None:
    (call,) = await ask_sampled(exporting.target, [_question(windows=4)])
    _wait_for_traces(exporting.collector, [call])
    computes = [span for span in exporting.collector.trace(call.trace_id) if span.name == Spans.COMPUTE]
    rows = [row for compute in computes for links in compute.links.values() for row in links]
    assert len(rows) > 2
    assert sum(int(row[Attributes.TOKENS]) for row in rows) == call.response.usage.tokens


async def test_the_timings_of_a_response_are_the_durations_of_its_spans(exporting: Observed) -> None:
    for number in range(_TRIES):
        # The median: a request that lost the CPU between two lines shows that in its rest. Beside other work, many do.
        if statistics.median(await _shares_of_stages(exporting, number)) >= 0.95:
            return
    raise AssertionError("the stages are not nearly all of the time")


async def _shares_of_stages(exporting: Observed, number: int) -> list[float]:
    """The parts of the time of some requests that stages have, whose spans are compared with the responses."""
    requests = [*(embed(f"text {number} {index}") for index in range(20)), _question(windows=3)]
    answered = await ask_sampled(exporting.target, requests)
    _wait_for_traces(exporting.collector, answered)
    covered = []
    for call in answered:
        spans, timings = exporting.collector.trace(call.trace_id), call.response.timings
        by_name = _by_name(spans)
        assert by_name[Spans.INFER].duration_ns == timings.total_ns
        assert by_name[Spans.PREPROCESS].duration_ns == timings.preprocess_ns
        assert by_name[Spans.PREDICT].duration_ns == timings.predict_ns
        assert by_name[Spans.POSTPROCESS].duration_ns == timings.postprocess_ns
        assert sum(span.duration_ns for span in spans if span.name == Spans.QUEUE) == timings.predict_queue_ns
        assert _covered_ns([span for span in spans if span.name == Spans.COMPUTE]) == timings.predict_compute_ns
        stages_ns = timings.preprocess_ns + timings.predict_ns + timings.postprocess_ns
        assert by_name[Spans.INFER].attributes[Attributes.UNATTRIBUTED_NS] == timings.total_ns - stages_ns
        covered.append(stages_ns / timings.total_ns)
    return covered


def _covered_ns(spans: Sequence[Received]) -> int:
    """How much time spans cover together."""
    covered = until = 0
    for span in sorted(spans, key=lambda span: span.started_ns):
        covered += max(0, span.ended_ns - max(span.started_ns, until))
        until = max(until, span.ended_ns)
    return covered


async def test_spans_tell_what_was_used(exporting: Observed) -> None:
    (call,) = await ask_sampled(exporting.target, [embed("a fine day")])
    _wait_for_traces(exporting.collector, [call])
    by_name = _by_name(exporting.collector.trace(call.trace_id))
    usage, root = call.response.usage, by_name[Spans.INFER]
    expected = {
        Attributes.MODEL: "minilm",
        Attributes.VERSION: "1",
        Attributes.TASK: "sentence_embedding",
        Attributes.REQUEST_ID: call.response.request_id,
        Attributes.TOKENS: usage.tokens,
        Attributes.TRUNCATED_TOKENS: 0,
        Attributes.TOKEN_CACHE: "miss",
        Attributes.BATCH_SIZE: usage.batch_size,
        Attributes.BUCKET_TOKENS: usage.bucket_tokens,
        Attributes.PADDED_TOKENS: usage.padded_tokens,
        Attributes.RPC_STATUS: "OK",
    }
    assert expected.items() <= root.attributes.items()
    assert root.kind == by_name[Spans.EXECUTE_RPC].kind == SERVER_KIND
    compute = by_name[Spans.COMPUTE]
    assert (compute.attributes[Attributes.BACKEND], compute.attributes[Attributes.CORE]) == ("fake", 0)


async def test_every_request_of_a_stream_is_a_span(exporting: Observed) -> None:
    trace_id = f"{random.getrandbits(128):032x}"
    async with open_channel(exporting.target) as channel:
        metadata = (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-01"),)
        requests = [InferStreamRequest(request=classify("x", request_id=str(number))) for number in range(3)]
        call = InferenceServiceStub(channel).InferStream(iter(requests), timeout=30, metadata=metadata)
        assert len([response async for response in call]) == 3
    exporting.collector.wait_until(lambda found: len(found.trace(trace_id)) >= 3 * _SPANS_OF_A_REQUEST)
    roots = [span for span in exporting.collector.trace(trace_id) if span.name == Spans.INFER_STREAM]
    assert sorted(str(root.attributes[Attributes.REQUEST_ID]) for root in roots) == ["0", "1", "2"]


async def test_an_expired_request_is_an_error_with_an_event_where_it_expired(slow_repository: Path) -> None:
    with grpc_collector() as collector, observed(slow_repository, collector, OTEL_TRACES_SAMPLER="always_on") as system:
        async with open_channel(system.target) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await InferenceServiceStub(channel).Infer(classify("too slow"), timeout=0.5)
        collector.wait_until(
            lambda found: {Spans.INFER, Spans.PREDICT, Spans.QUEUE} <= {span.name for span in found.spans}
        )
        by_name = _by_name(collector.spans)
    for name in (Spans.INFER, Spans.PREDICT, Spans.EXECUTE_RPC, Spans.QUEUE):
        assert by_name[name].is_error, name
        assert by_name[name].attributes[Attributes.ERROR_TYPE] == "DEADLINE_EXCEEDED", name
        assert by_name[name].events == (Events.EXPIRED,), name
    assert not by_name[Spans.PREPROCESS].is_error
