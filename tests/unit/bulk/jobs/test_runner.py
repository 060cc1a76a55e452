"""How a worker calls its gateway for several tenants, and reads and writes what jobs have."""

import asyncio
import json
import resource
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, InferResponse
from neuronpipe.api.v1.jobs_pb2 import JobResult, SubmitInferenceRequest
from neuronpipe.bulk.jobs import objects, runner
from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.invocation import Invoker
from neuronpipe.bulk.jobs.job import JobProgress, StoredJob
from neuronpipe.bulk.jobs.runner import Runner
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.platform.process.background import Places
from neuronpipe.platform.storage import ObjectUri, Storage, StorageError
from tests.suite.waiting import cancelled, happens


@pytest.fixture
async def gateway() -> AsyncIterator[BulkGateway]:
    gateway = BulkGateway("127.0.0.1:1", None, max_in_flight=2)
    yield gateway
    await gateway.close()


def _nothing() -> None:
    pass


@pytest.mark.parametrize(
    "error", [Overloaded("tenant 'small': the limit is 1000 tokens a minute", 120), Unavailable("no process has it")]
)
async def test_a_tenant_that_is_refused_stops_no_other(gateway: BulkGateway, error: NeuronpipeError) -> None:
    async def refuse() -> str:
        raise error

    async def answer() -> str:
        return "answer"

    flood = [asyncio.create_task(gateway.admitted(refuse, "small", _nothing)) for _ in range(60)]
    await asyncio.sleep(0.01)
    began_s = time.monotonic()
    for _ in range(20):
        assert await gateway.admitted(answer, "victim", _nothing) == "answer"
    assert time.monotonic() - began_s < 1
    assert set(gateway.closed_s()) == {"small"}
    await cancelled(*flood)


async def test_a_refused_call_is_sent_again_when_the_gateway_says(gateway: BulkGateway) -> None:
    outcomes: list[Overloaded | None] = [Overloaded("full", 0.3), None]
    sent: list[float] = []

    async def call() -> str:
        if error := outcomes.pop(0):
            raise error
        return "answer"

    assert await gateway.admitted(call, "a", lambda: sent.append(time.monotonic())) == "answer"
    assert 0.3 <= sent[1] - sent[0] < 1


async def test_the_log_says_once_why_no_gateway_answers(gateway: BulkGateway, caplog: pytest.LogCaptureFixture) -> None:
    outcomes = [Unavailable("connection refused")] * 2 + [Unavailable("it stops"), None] * 2

    async def call() -> None:
        if error := outcomes.pop(0):
            raise error

    for _ in range(2):
        await gateway.admitted(call, "a", _nothing)
    assert {record.message for record in caplog.records} == {"the gateway does not answer for jobs; they wait"}
    reasons = [record.__dict__["fields"]["reason"] for record in caplog.records]
    assert reasons == ["connection refused", "it stops", "it stops"]


async def test_an_unreachable_gateway_is_in_the_log(gateway: BulkGateway, caplog: pytest.LogCaptureFixture) -> None:
    asking = asyncio.create_task(gateway.outcome(InferRequest(model="a"), "a", None, 60, _nothing))
    await happens(lambda: bool(caplog.records))
    asking.cancel()
    assert "Connection refused" in caplog.records[0].__dict__["fields"]["reason"]


async def test_tenants_get_places_in_turns() -> None:
    places = Places(1)
    order: list[str] = []

    async def use(tenant: str) -> None:
        async with places.taken(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(use(tenant) for tenant in "mmmmmvv"))
    assert "".join(order) == "mmvmvmm"


async def test_one_who_leaves_as_a_place_comes_passes_it_on() -> None:
    places = Places(1)
    ends, has_place = asyncio.Event(), asyncio.Event()

    async def use(wait: Callable[[], Awaitable[object]]) -> None:
        async with places.taken("a"):
            has_place.set()
            await wait()

    first = asyncio.create_task(use(ends.wait))
    await has_place.wait()
    second, third = (asyncio.create_task(use(lambda: asyncio.sleep(0))) for _ in range(2))
    await asyncio.sleep(0)
    ends.set()
    await first
    await cancelled(second)
    await asyncio.wait_for(third, 1)


_ROW = b'{"model": "a", "input": {"text_classification": {"text": "x"}}}\n'


class _Answers:
    """A gateway that answers at once. `model`: of its answers."""

    def __init__(self, model: str = "a") -> None:
        self.asked: list[str] = []
        self.at_once = self.most_at_once = 0
        self._model = model

    async def outcome(self, request: InferRequest, *_: object) -> InferOutcome:
        self.asked.append(request.request_id)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return InferOutcome(response=InferResponse(request_id=request.request_id, model=self._model))


class _Away(Storage):
    """Objects that cannot be read or written at first."""

    def __init__(self, reads: int = 0, writes: int = 0) -> None:
        super().__init__()
        self._reads, self._writes = reads, writes

    def open(self, uri: ObjectUri, max_bytes: int) -> BinaryIO:
        self._reads -= 1
        if self._reads >= 0:
            raise StorageError("does not answer", is_lasting=False)
        return super().open(uri, max_bytes)

    def write(self, uri: ObjectUri, content: bytes | BinaryIO) -> None:
        self._writes -= 1
        if self._writes >= 0:
            raise StorageError("does not answer", is_lasting=False)
        super().write(uri, content)


class _Hung(Storage):
    """Objects that are neither read nor written before `ends`."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = threading.Event()

    def open(self, uri: ObjectUri, max_bytes: int) -> BinaryIO:
        self.ends.wait()
        return super().open(uri, max_bytes)

    def write(self, uri: ObjectUri, content: bytes | BinaryIO) -> None:
        self.ends.wait()
        super().write(uri, content)


async def _run(
    gateway: Any, input_uri: str = "", output_uri: str = "", *, storage: Storage | None = None, **given: Any
) -> JobResult:
    submitted = SubmitInferenceRequest(input_uri=input_uri, output_uri=output_uri, requests=given.get("requests", ()))
    fields = {b"limit": b"900", b"request": submitted.SerializeToString()}
    settings = WorkerSettings.of(**given.get("limits", {}))
    job_objects = objects.JobObjects(storage or Storage(), settings.max_input_bytes)
    runner = Runner(gateway, Invoker(gateway, job_objects, settings), job_objects, settings)
    return await runner.run(StoredJob.of("j", fields), JobProgress(), None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


async def test_a_file_of_inputs_is_never_in_memory_as_a_whole(file: Path, tmp_path: Path) -> None:
    """Three thousand lines of 10 KB each, with outcomes of as many bytes."""
    row = json.dumps({"model": "a", "input": {"text_classification": {"text": "x" * 10_000}}}).encode()
    file.write_bytes((row + b"\r\n\n") * 3000)
    gateway = _Answers("a" * 10_000)
    tracemalloc.start()
    result = await _run(gateway, f"file://{file}", f"file://{tmp_path}/out")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 12 << 20 < file.stat().st_size
    assert (result.succeeded, result.failed) == (3000, 0)
    ids = [json.loads(line)["response"]["request_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert ids == [f"j/{number}" for number in range(3000)]
    assert gateway.most_at_once > 8


async def test_lines_are_counted_before_any_is_run(file: Path, tmp_path: Path) -> None:
    gateway = _Answers()
    file.write_bytes(b"{}\n" * 1001)
    with pytest.raises(InvalidInput, match=r"^input_uri: .* has more than 1000 lines, the limit .*max_input_lines"):
        await _run(gateway, f"file://{file}", f"file://{tmp_path}/out", limits={"max_input_lines": 1000})
    file.write_bytes(b"{}\n" * 50_000)
    problem = r"^input_uri: .* lines, the limit .*max_result_bytes, without an output_uri"
    with pytest.raises(InvalidInput, match=problem):
        await _run(gateway, f"file://{file}")
    assert gateway.asked == []


async def test_a_line_that_would_take_too_much_memory_is_an_error_in_its_place(file: Path) -> None:
    file.write_bytes(b"\n".join([b'{"a": "%s"}' % (b"x" * (16 << 20)), b"[" + b"{}," * 100_000 + b"{}]", b"", _ROW]))
    result = await _run(_Answers(), f"file://{file}")
    assert [outcome.error.message for outcome in result.outcomes] == [
        "input_uri: line 1 is longer than 16777216 bytes, the limit",
        "input_uri: line 2 holds too many values: they would take more than 16 MiB, the limit",
        "",
    ]
    assert (result.succeeded, result.failed) == (1, 2)


async def test_a_result_has_the_bytes_that_it_may_have_and_errors_for_the_rest(file: Path) -> None:
    file.write_bytes(_ROW * 1000)
    result = await _run(
        _Answers("a" * 1000), f"file://{file}", limits={"max_result_bytes": 200_000, "max_input_lines": 1000}
    )
    assert 190_000 < result.ByteSize() <= 200_000 + 20
    assert (result.succeeded, result.failed) == (result.succeeded, 1000 - result.succeeded)
    expected = "requests: the result is larger than 200000 bytes, the limit; give an output_uri"
    assert result.outcomes[-1].error.message == expected


async def test_a_write_is_repeated_and_not_the_job(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.0)
    file.write_bytes(_ROW * 100)
    gateway = _Answers()
    result = await _run(gateway, f"file://{file}", f"file://{tmp_path}/out", storage=_Away(writes=9))
    assert (result.succeeded, len(gateway.asked)) == (100, 100)
    assert len((tmp_path / "out").read_text().splitlines()) == 100


async def test_a_job_whose_outcomes_find_no_room_on_the_disk_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the process stands for the disk: it takes the first 32 outcomes, and a part of the other 28."""
    monkeypatch.setattr(runner, "_SPOOLED_BYTES", 1 << 10)
    file.write_bytes(_ROW * 60)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 10, limits[1]))
    try:
        with pytest.raises(Overloaded, match=r"^the worker has no room left for outcomes in its temporary folder$"):
            await _run(_Answers(), f"file://{file}", f"file://{tmp_path}/out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


async def test_a_file_that_cannot_be_read_at_first_is_left_to_the_next_attempt(file: Path) -> None:
    file.write_bytes(_ROW * 100)
    with pytest.raises(Unavailable, match="input_uri"):
        await _run(_Answers(), f"file://{file}", storage=_Away(reads=1))


class _Writer(_Answers):
    """A gateway beside which another program writes the file again, with other lines or fewer."""

    def __init__(self, file: Path, content: bytes) -> None:
        super().__init__()
        self._file, self._content = file, content

    async def outcome(self, request: InferRequest, *_: object) -> InferOutcome:
        if self._content:
            self._file.write_bytes(self._content)
            self._content = b""
        return await super().outcome(request)


@pytest.mark.parametrize("content", [_ROW * 40, _ROW.replace(b'"x"', b'"y"') * 1_000], ids=["cut", "other"])
async def test_a_file_that_changes_while_it_is_read_is_left_to_the_next_attempt(
    content: bytes, file: Path, tmp_path: Path
) -> None:
    file.write_bytes(_ROW * 1_000)
    gateway = _Writer(file, content)
    with pytest.raises(Unavailable, match=r"^input_uri: the object has changed while the job read it$"):
        await _run(gateway, f"file://{file}", f"file://{tmp_path}/out")
    assert not (tmp_path / "out").exists()
    assert (await _run(gateway, f"file://{file}", f"file://{tmp_path}/out")).succeeded == content.count(b"\n")


@pytest.mark.parametrize("hangs", ["reads", "writes"])
async def test_a_storage_that_hangs_delays_no_jobs_without_objects(hangs: str, file: Path, tmp_path: Path) -> None:
    file.write_bytes(_ROW)
    storage, gateway = _Hung(), _Answers()
    given = (f"file://{file}", "") if hangs == "reads" else ("", f"file://{tmp_path}/out")
    rows = [] if hangs == "reads" else [InferRequest(model="a")]
    hung = [asyncio.create_task(_run(gateway, *given, storage=storage, requests=rows)) for _ in range(40)]
    if hangs == "writes":
        await happens(lambda: len(gateway.asked) == 40)
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(5):
            assert (await _run(gateway, requests=[InferRequest(model="a")])).succeeded == 1
    finally:
        storage.ends.set()
    assert [result.succeeded for result in await asyncio.gather(*hung)] == [1] * 40


async def test_nothing_is_sent_while_the_lease_may_have_ended() -> None:
    progress = JobProgress(lease_ends_s=time.monotonic() - 1)
    leased = asyncio.create_task(progress.leased())
    await asyncio.sleep(0.05)
    assert not leased.done()
    progress.renew(time.monotonic() - 0.5)
    await asyncio.sleep(0.05)
    assert not leased.done()
    progress.renew(time.monotonic() + 60)
    await asyncio.wait_for(leased, 1)
