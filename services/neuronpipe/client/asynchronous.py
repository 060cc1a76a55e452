"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
    Priority,
)
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.models_pb2 import GetModelRequest, ListModelsRequest, Model
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceStub
from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    Answer,
    Entity,
    FeatureExtractionInput,
    FeaturePooling,
    FeatureType,
    FilledMask,
    FillMaskInput,
    ImageClassificationInput,
    LabelScore,
    QuestionAnsweringInput,
    RankedText,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
    Truncation,
    ZeroShotClassificationInput,
)
from neuronpipe.client.features import to_array
from neuronpipe.rpc.client import error_of, open_channel

ResponseT = TypeVar("ResponseT")
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[InferStreamRequest, InferStreamResponse]"

# Inference has no side effects, so a call that no server began (UNAVAILABLE), or that one refused as too much (RESOURCE_EXHAUSTED),
# may be repeated. gRPC itself does it: it waits as long as the server's pushback says, and stops altogether while most calls fail.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "neuronpipe.api.v1.InferenceService"}, {"service": "neuronpipe.api.v1.ModelService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}


class AsyncClient:
    """Calls a gateway. Methods raise the errors of neuronpipe.core.errors.

    The client's `timeout_s`, in seconds and finite, is the deadline of every call but infer_stream's, retries included; None for no
    deadline. A method's `timeout_s` replaces it for one call; None leaves the client's. A deadline of 0 or less has passed already:
    gRPC ends the call at once, with DeadlineExceeded.

    `is_bulk` marks what the methods of the tasks (classify, embed and so on) send as work for which time matters less: it waits while
    interactive work does, and is refused first. A request given to infer, infer_batch or infer_stream has its own `priority`.

    Safe to share between tasks; use as `async with AsyncClient("host:50050") as client:` or call `close`.
    """

    def __init__(self, target: str, *, timeout_s: float | None = 30.0, retries: bool = True, is_bulk: bool = False) -> None:
        """`target`: a gRPC target such as "host:50050" or "dns:///gateway:50050"; calls go round all of its addresses."""
        self._timeout_s = timeout_s
        self._priority = Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE
        self._channel = open_channel(target, _RETRIES if retries else None)
        self._inference = InferenceServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    async def classify(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        top_k: int = 1,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """The `top_k` labels of a text or a pair, best first."""
        input = TextClassificationInput(text=text, text_pair=text_pair, top_k=top_k, function=function, truncation=truncation)
        response = await self._infer(model, version, TaskInput(text_classification=input))
        return response.result.text_classification.labels

    async def embed(
        self,
        model: str,
        text: str,
        *,
        normalize: bool = True,
        dimensions: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> NDArray[np.float32]:
        """The vector of a text: float32 [dimensions, or the model's width]."""
        input = SentenceEmbeddingInput(text=text, skip_normalize=not normalize, dimensions=dimensions, truncation=truncation)
        response = await self._infer(model, version, TaskInput(sentence_embedding=input))
        return np.array(response.result.sentence_embedding.embedding, np.float32)

    async def answer(
        self,
        model: str,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_tokens: int = 0,
        window_stride_tokens: int = 0,
        allow_no_answer: bool = False,
        version: str = "",
    ) -> Sequence[Answer]:
        """The `top_k` passages of the context that answer the question, best first."""
        input = QuestionAnsweringInput(
            question=question,
            context=context,
            top_k=top_k,
            max_answer_tokens=max_answer_tokens,
            window_stride_tokens=window_stride_tokens,
            allow_no_answer=allow_no_answer,
        )
        response = await self._infer(model, version, TaskInput(question_answering=input))
        return response.result.question_answering.answers

    async def find_entities(
        self,
        model: str,
        text: str,
        *,
        aggregation: "Aggregation.ValueType" = Aggregation.AGGREGATION_SIMPLE,
        ignore_labels: Sequence[str] = (),
        keep_all_labels: bool = False,
        window_stride_tokens: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[Entity]:
        """The named things of a text, in its order; with AGGREGATION_NONE a label for each token."""
        input = TokenClassificationInput(
            text=text,
            aggregation=aggregation,
            ignore_labels=ignore_labels,
            keep_all_labels=keep_all_labels,
            window_stride_tokens=window_stride_tokens,
            truncation=truncation,
        )
        response = await self._infer(model, version, TaskInput(token_classification=input))
        return response.result.token_classification.entities

    async def fill_masks(
        self,
        model: str,
        text: str,
        *,
        top_k: int = 0,
        targets: Sequence[str] = (),
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> Sequence[FilledMask]:
        """The `top_k` tokens (default 5) that fit in place of each mask, best first. get_model gives the model's `mask_token`."""
        input = FillMaskInput(text=text, top_k=top_k, targets=targets, truncation=truncation)
        response = await self._infer(model, version, TaskInput(fill_mask=input))
        return response.result.fill_mask.masks

    async def extract_features(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        pooling: "FeaturePooling.ValueType" = FeaturePooling.FEATURE_POOLING_NONE,
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> NDArray[np.float32]:
        """The token vectors of a text or a pair: float32 [tokens, width], or pooled [width]. They travel as `type`."""
        input = FeatureExtractionInput(text=text, text_pair=text_pair, pooling=pooling, type=type, truncation=truncation)
        return to_array((await self._infer(model, version, TaskInput(feature_extraction=input))).result.feature_extraction)

    async def compare(
        self,
        model: str,
        source: str,
        texts: Iterable[str],
        *,
        dimensions: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> Sequence[float]:
        """How alike the source and each of the texts are, -1 to 1, in the order of the texts."""
        input = SentenceSimilarityInput(source=source, texts=texts, dimensions=dimensions, truncation=truncation)
        return (await self._infer(model, version, TaskInput(sentence_similarity=input))).result.sentence_similarity.scores

    async def rerank(
        self,
        model: str,
        query: str,
        texts: Iterable[str],
        *,
        top_n: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> Sequence[RankedText]:
        """The `top_n` texts (0: all) that answer the query, best first, each with its place among `texts`."""
        input = RerankInput(query=query, texts=texts, top_n=top_n, function=function, truncation=truncation)
        return (await self._infer(model, version, TaskInput(rerank=input))).result.rerank.texts

    async def classify_zero_shot(
        self,
        model: str,
        text: str,
        candidate_labels: Iterable[str],
        *,
        hypothesis_template: str = "",
        multi_label: bool = False,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """All candidate labels of a text, best first."""
        input = ZeroShotClassificationInput(
            text=text,
            candidate_labels=candidate_labels,
            hypothesis_template=hypothesis_template,
            multi_label=multi_label,
            truncation=truncation,
        )
        return (await self._infer(model, version, TaskInput(zero_shot_classification=input))).result.zero_shot_classification.labels

    async def classify_image(
        self,
        model: str,
        image: bytes,
        *,
        top_k: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """The `top_k` labels (0: five, or all) of an image, which is the bytes of a JPEG, PNG or WebP file; best first."""
        input = ImageClassificationInput(image=image, top_k=top_k, function=function)
        response = await self._infer(model, version, TaskInput(image_classification=input))
        return response.result.image_classification.labels

    async def _infer(self, model: str, version: str, input: TaskInput) -> InferResponse:
        return await self.infer(InferRequest(model=model, version=version, input=input, priority=self._priority))

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        """Runs one input of any task; the response also has the stage timings and the usage."""
        return await _result(self._inference.Infer(request, timeout=self._deadline_s(timeout_s)))

    async def infer_batch(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        """Runs many inputs; outcomes come in the order of the requests, each a response or an error of its own."""
        call = self._inference.InferBatch(InferBatchRequest(requests=requests), timeout=self._deadline_s(timeout_s))
        return (await _result(call)).outcomes

    async def infer_stream(
        self, requests: AsyncIterable[InferRequest] | Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> AsyncGenerator[InferStreamResponse, None]:
        """Runs inputs as they are yielded; answers come as they are ready, named by their request_id.

        `timeout_s` is the deadline of the whole stream; None for no deadline, whatever the client's. What `requests` raises ends the
        call and is raised here.
        """
        call = self._inference.InferStream(timeout=timeout_s)
        # Not gRPC's own reading of an iterator: that goes on when the call has ended, and hides what the iterator raises.
        sending = asyncio.create_task(_send(requests, call))
        try:
            async for response in call:
                yield response
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as failure:
            if sending.done() and not sending.cancelled() and (fault := sending.exception()):
                raise fault from None
            if isinstance(failure, grpc.aio.AioRpcError):
                raise error_of(failure) from failure
            raise
        finally:
            call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def list_models(self) -> Sequence[Model]:
        """Every version of every model."""
        return (await _result(self._models.ListModels(ListModelsRequest(), timeout=self._timeout_s))).models

    async def get_model(self, name: str, version: str = "") -> Model:
        """One model."""
        return (await _result(self._models.GetModel(GetModelRequest(name=name, version=version), timeout=self._timeout_s))).model

    async def close(self) -> None:
        """Ends all calls and closes the connections."""
        await self._channel.close()

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


async def _result(call: Awaitable[ResponseT]) -> ResponseT:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure) from failure


async def _send(requests: AsyncIterable[InferRequest] | Iterable[InferRequest], call: _StreamCall) -> None:
    """Sends the requests until there are no more or the call ends. Raises what reading them raises, with the call cancelled."""
    try:
        async for request in _each(requests):
            try:
                await call.write(InferStreamRequest(request=request))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended; whoever reads it is told why
                return
    except Exception:
        call.cancel()
        raise
    await call.done_writing()


async def _each(requests: AsyncIterable[InferRequest] | Iterable[InferRequest]) -> AsyncIterator[InferRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
