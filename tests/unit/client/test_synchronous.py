"""client/synchronous.py: what closing does to calls, whenever they come."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.client import Client
from neuronpipe.core.errors import Cancelled
from tests.unit.client.fake_gateway import FakeGateway, fake_gateway

_ENDLESS_STREAM = """
import itertools, sys
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.client import Client
client = Client(sys.argv[1])
answers = client.infer_stream(InferRequest(request_id=str(number)) for number in range(1000))
print(next(answers).request_id)
"""


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with fake_gateway() as gateway:
        yield gateway


@pytest.fixture(scope="module", autouse=True)
def _only_these_tests_leave_garbage() -> None:
    """What others have left is no longer looked at, which takes half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged ("Task was destroyed but it is pending"); warnings are errors anyway (pyproject.toml).

    grpc.aio sometimes brings an event of a closed loop to another loop of the process, which logs that (grpcio 1.85).
    """
    yield
    gc.collect()
    logged = [record.getMessage() for record in caplog.records]
    assert [message for message in logged if "PollerCompletionQueue._handle_events" not in message] == []


def _requests() -> Iterator[InferRequest]:
    return (InferRequest(request_id=str(number)) for number in range(1000))


class _Thread(threading.Thread):
    """Runs a call and keeps what it raises."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.raised = error


def test_closing_again_does_nothing(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client:
        client.close()
        client.close()


def _client_threads() -> set[threading.Thread]:
    """The threads of open clients; other tests of this process may have some."""
    return {thread for thread in threading.enumerate() if thread.name == "neuronpipe-client"}


def test_closing_ends_the_thread(gateway: FakeGateway) -> None:
    before = _client_threads()
    client = Client(gateway.target)
    assert len(_client_threads() - before) == 1
    client.close()
    assert _client_threads() <= before


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.classify("m", "x"),
        lambda client: client.embed("m", "x"),
        lambda client: client.infer(InferRequest()),
        lambda client: client.infer_batch([InferRequest()]),
        lambda client: next(client.infer_stream(_requests())),
        lambda client: client.list_models(),
        lambda client: client.get_model("m"),
    ],
)
def test_a_call_of_a_closed_client_says_so(gateway: FakeGateway, call: Callable[[Client], object]) -> None:
    client = Client(gateway.target)
    client.close()
    with pytest.raises(RuntimeError, match=r"^the client is closed$"):
        call(client)


def test_calls_that_closing_cuts_off_are_cancelled(gateway: FakeGateway) -> None:
    client = Client(gateway.target)
    threads = [_Thread(lambda: client.infer(InferRequest())) for _ in range(4)]
    assert gateway.has_begun.wait(10)

    client.close()

    for thread in threads:
        thread.join(10)
        # A thread that had not made its call yet came too late.
        assert isinstance(thread.raised, Cancelled | RuntimeError)
        assert str(thread.raised) in ("the client was closed during the call", "the client is closed")
    assert any(isinstance(thread.raised, Cancelled) for thread in threads)


def test_every_thread_that_closes_waits_for_the_end(gateway: FakeGateway) -> None:
    client = Client(gateway.target)
    threads = [_Thread(client.close) for _ in range(4)]
    for thread in threads:
        thread.join(10)
    assert [thread.raised for thread in threads] == [None] * 4


def test_a_stream_left_open_is_cut_off_by_closing(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client:
        answers = client.infer_stream(_requests())
        next(answers)
    with pytest.raises(Cancelled, match=r"^the client was closed during the call$"):
        next(answers)
    assert gateway.has_ended.wait(10)


def test_a_stream_left_open_can_be_left_after_closing(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client:
        answers = client.infer_stream(_requests())
        next(answers)
    answers.close()


def test_leaving_a_stream_ends_its_call(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client:
        answers = client.infer_stream(_requests())
        next(answers)
        answers.close()
        assert gateway.has_ended.wait(10)


def test_what_reading_the_requests_raises_is_the_callers(gateway: FakeGateway) -> None:
    fault = OSError("the file of texts is gone")

    def unreadable() -> Iterator[InferRequest]:
        yield InferRequest(request_id="1")
        raise fault

    with Client(gateway.target) as client, pytest.raises(OSError, match="is gone") as caught:
        list(client.infer_stream(unreadable()))
    assert caught.value is fault


def test_a_client_that_cannot_be_made_raises_and_leaves_no_thread() -> None:
    before = _client_threads()
    with pytest.raises(UnicodeEncodeError):
        Client("\ud83d:50050")
    assert _client_threads() <= before


def test_a_program_that_closes_nothing_ends(gateway: FakeGateway) -> None:
    command = [sys.executable, "-W", "error", "-c", _ENDLESS_STREAM, gateway.target]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def test_texts_that_a_bulk_client_streams_have_bulk_priority(gateway: FakeGateway) -> None:
    gateway.answering.set()
    with Client(gateway.target, is_bulk=True) as client:
        list(client.generate("m", "x"))
    assert [request.priority for request in gateway.requests] == [Priority.PRIORITY_BULK]
