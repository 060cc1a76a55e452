"""A thin synchronous wrapper of AsyncClient, which runs on an event loop in a thread of its own."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from neuronpipe.client.asynchronous import AsyncClient
from neuronpipe.client.jobs import AsyncJob
from neuronpipe.client.task_call import TaskCall, ValueT
from neuronpipe.client.task_methods import TaskMethods
from neuronpipe.core.errors import Cancelled
from neuronpipe.platform.tls import TlsFiles

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_CUT_OFF = "the client was closed during the call"


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]],
) -> "Callable[Concatenate[Client | Job, P], ResultT]":
    """Returns a method that waits for the method of the asynchronous client or job."""

    @wraps(method)
    def call(owner: "Client | Job", /, *arguments: P.args, **options: P.kwargs) -> ResultT:
        return owner._wait(method(owner._asynchronous, *arguments, **options))

    return call


class Job:
    """A job of a Client, as AsyncJob, with methods that block."""

    def __init__(self, job: AsyncJob, client: "Client") -> None:
        self.name = job.name
        self._asynchronous = job
        self._wait = client._wait

    wait = _blocking(AsyncJob.wait)
    status = _blocking(AsyncJob.status)
    cancel = _blocking(AsyncJob.cancel)
    delete = _blocking(AsyncJob.delete)


def _streaming(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[ResultT, None]],
) -> "Callable[Concatenate[Client, P], Generator[ResultT, None, None]]":
    """Returns a method of Client that yields the answers of its AsyncClient's method."""

    @wraps(method)
    def call(client: "Client", /, *arguments: P.args, **options: P.kwargs) -> Generator[ResultT, None, None]:
        yield from client._answers(method(client._asynchronous, *arguments, **options))

    return call


def _job_of(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, AsyncJob]],
) -> "Callable[Concatenate[Client, P], Job]":
    """Returns a method of Client that returns the job of its AsyncClient's method, with methods that block."""

    @wraps(method)
    def call(client: "Client", /, *arguments: P.args, **options: P.kwargs) -> "Job":
        return Job(client._wait(method(client._asynchronous, *arguments, **options)), client)

    return call


class Client(TaskMethods):
    """The blocking form of AsyncClient. Safe to share between threads.

    A call that is running at `close` raises Cancelled; a call after `close` raises RuntimeError.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = 30.0,
        retries: bool = True,
        is_bulk: bool = False,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
        route_key: str = "",
    ) -> None:
        """See AsyncClient."""
        super().__init__(is_bulk=is_bulk)
        # Reentrant: the garbage collector may end a stream, which takes the lock, in a thread that already holds it.
        self._lock = threading.RLock()
        self._is_closed = False
        is_made: concurrent.futures.Future[None] = concurrent.futures.Future()
        make = partial(
            AsyncClient,
            target,
            timeout_s=timeout_s,
            retries=retries,
            is_bulk=is_bulk,
            tls=tls,
            api_key=api_key,
            route_key=route_key,
        )
        hold = partial(self._hold, make, is_made)
        self._thread = threading.Thread(target=lambda: asyncio.run(hold()), name="neuronpipe-client", daemon=True)
        self._thread.start()
        try:
            is_made.result()
        except Exception:
            self._thread.join()
            raise

    def _call(self, call: TaskCall[ValueT]) -> ValueT:
        return call.read(self.infer(call.request).result)

    infer = _blocking(AsyncClient.infer)
    infer_batch = _blocking(AsyncClient.infer_batch)
    infer_stream = _streaming(AsyncClient.infer_stream)
    generate = _streaming(AsyncClient.generate)
    stream = _streaming(AsyncClient.stream)
    list_jobs = _blocking(AsyncClient.list_jobs)
    list_models = _blocking(AsyncClient.list_models)
    get_model = _blocking(AsyncClient.get_model)
    submit = _job_of(AsyncClient.submit)

    def job(self, name: str) -> "Job":
        """See AsyncClient.job."""
        return Job(self._asynchronous.job(name), self)

    def close(self) -> None:
        """Ends all calls, closes the connections and ends the thread. May be called several times, from any thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, answers: AsyncGenerator[ResultT, None]) -> Generator[ResultT, None, None]:
        """Yields the answers of one call, which ends with the generator."""
        stream = _Stream(answers)
        try:
            answer = self._wait(stream.next())
            while answer is not None:
                yield answer
                answer = self._wait(stream.next(), is_begun=True)
        finally:
            # Does not wait: the garbage collector may end it in the client's own thread, or at the interpreter's exit.
            self._submit(stream.close())

    async def _hold(self, make: Callable[[], AsyncClient], is_made: "concurrent.futures.Future[None]") -> None:
        """Keeps the asynchronous client, which belongs to this event loop, open until `close`.

        Then it cancels the running calls.
        """
        try:
            self._loop = asyncio.get_running_loop()
            self._closing = asyncio.Event()
            self._asynchronous = make()
        except BaseException as fault:
            is_made.set_exception(fault)
            return
        is_made.set_result(None)
        async with self._asynchronous:
            await self._closing.wait()
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _wait(self, coroutine: Coroutine[Any, Any, ResultT], *, is_begun: bool = False) -> ResultT:
        """Returns the coroutine's result. `is_begun`: a later part of a call, which `close` ends with Cancelled."""
        future = self._submit(coroutine)
        if future is None:
            raise Cancelled(_CUT_OFF) if is_begun else RuntimeError("the client is closed")
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled(_CUT_OFF) from None
        except BaseException:  # also KeyboardInterrupt: the call must not continue without its caller
            future.cancel()
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> "concurrent.futures.Future[ResultT] | None":
        """Starts the coroutine on the client's loop; None if the client is closed."""
        with self._lock:
            if self._is_closed:
                coroutine.close()
                return None
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Stream(Generic[ResultT]):
    """The answers of one stream.

    One coroutine uses it at a time: an interrupted `next` may not have ended yet at `close`.
    """

    def __init__(self, answers: AsyncGenerator[ResultT, None]) -> None:
        self._answers = answers
        self._lock = asyncio.Lock()

    async def next(self) -> ResultT | None:
        async with self._lock:
            return await anext(self._answers, None)

    async def close(self) -> None:
        async with self._lock:
            await self._answers.aclose()
