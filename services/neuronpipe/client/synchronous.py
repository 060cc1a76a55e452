"""A thin synchronous front over AsyncClient, which runs on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, InferResponse, InferStreamResponse
from neuronpipe.api.v1.models_pb2 import Model
from neuronpipe.api.v1.tasks_pb2 import Answer, LabelScore
from neuronpipe.client.asynchronous import AsyncClient

ResultT = TypeVar("ResultT")


class Client:
    """As AsyncClient, blocking. Safe to share between threads."""

    def __init__(self, target: str, *, timeout_s: float | None = 30.0, retries: bool = True) -> None:
        """See AsyncClient."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="neuronpipe-client", daemon=True)
        self._thread.start()
        self._client = self._wait(_make(target, timeout_s, retries))

    def classify(self, model: str, text: str, text_pair: str = "", **options: Any) -> Sequence[LabelScore]:
        """See AsyncClient.classify."""
        return self._wait(self._client.classify(model, text, text_pair, **options))

    def embed(self, model: str, text: str, **options: Any) -> NDArray[np.float32]:
        """See AsyncClient.embed."""
        return self._wait(self._client.embed(model, text, **options))

    def answer(self, model: str, question: str, context: str, **options: Any) -> Sequence[Answer]:
        """See AsyncClient.answer."""
        return self._wait(self._client.answer(model, question, context, **options))

    def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        """See AsyncClient.infer."""
        return self._wait(self._client.infer(request, timeout_s=timeout_s))

    def infer_batch(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        """See AsyncClient.infer_batch."""
        return self._wait(self._client.infer_batch(requests, timeout_s=timeout_s))

    def infer_stream(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> Generator[InferStreamResponse, None, None]:
        """See AsyncClient.infer_stream. `requests` is read in the client's thread: it must not block."""
        answers = self._client.infer_stream(requests, timeout_s=timeout_s)
        try:
            while (answer := self._wait(anext(answers, None))) is not None:
                yield answer
        finally:
            self._wait(_close(answers))

    def list_models(self) -> Sequence[Model]:
        """See AsyncClient.list_models."""
        return self._wait(self._client.list_models())

    def get_model(self, name: str, version: str = "") -> Model:
        """See AsyncClient.get_model."""
        return self._wait(self._client.get_model(name, version))

    def close(self) -> None:
        """Ends all calls, closes the connections and ends the thread."""
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt too: the call must not run on behind the caller's back
            future.cancel()
            raise


async def _make(target: str, timeout_s: float | None, retries: bool) -> AsyncClient:
    # A channel belongs to the loop on which it is made.
    return AsyncClient(target, timeout_s=timeout_s, retries=retries)


async def _close(answers: Any) -> None:
    await answers.aclose()
