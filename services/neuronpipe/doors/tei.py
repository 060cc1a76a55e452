"""tei.v1, the gRPC API of text-embeddings-inference (TEI), on the gateway's own port.

TEI serves one model; here metadata names one of several, or a default one answers (doors/inference.py).
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from neuronpipe import __version__
from neuronpipe.api.tei.v1 import tei_pb2 as tei
from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.models_pb2 import GetModelRequest
from neuronpipe.api.v1.tasks_pb2 import (
    DetokenizationInput,
    FeatureExtractionInput,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SparseEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    TokenizationInput,
    Truncation,
)
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors.inference import (
    MODEL_FIELD,
    PRIORITY_FIELD,
    VERSION_FIELD,
    Inference,
    ModelChoice,
    ModelName,
    check_second,
    read_priority,
    truncation_of,
)
from neuronpipe.doors.vectors import float32_bytes, token_places, token_vectors, write_numbers
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import InferenceResult
from neuronpipe.gateway.many import answer_in_order
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, call_of, handlers_of, metadata_of
from neuronpipe.tasks.many_texts import MAX_TEXTS

MessageT = TypeVar("MessageT")
AnswerT = TypeVar("AnswerT")

SERVICES: Mapping[str, ServiceDescriptor] = tei.DESCRIPTOR.services_by_name
_FIELDS = {"text": "inputs", "text_pair": "inputs", "token_ids": "ids", "truncation": "truncate"}
_MODEL_TYPES = {
    "text_classification": tei.MODEL_TYPE_CLASSIFIER,
    "zero_shot_classification": tei.MODEL_TYPE_CLASSIFIER,
    "rerank": tei.MODEL_TYPE_RERANKER,
}
_LEFT = tei.TRUNCATION_DIRECTION_LEFT


class _Asked(NamedTuple):
    """The call, the priority and the model of an rpc, for each of its requests."""

    call: Call
    priority: "Priority.ValueType"
    model: ModelName


class TeiDoor:
    """Converts TEI's messages to calls of the pipeline and back."""

    def __init__(self, inference: Inference, models: ModelChoice, catalog: Catalog, settings: PipelineSettings) -> None:
        self._inference = inference
        self._models = models
        self._catalog = catalog
        self._settings = settings

    def handlers(self) -> RpcHandlers:
        """All services."""

        def one(answer: Callable[[MessageT, _Asked], Awaitable[AnswerT]]) -> RpcHandler:
            return lambda message, context: answer(message, _asked(context))

        def many(answer: Callable[[MessageT, _Asked], Awaitable[AnswerT]]) -> RpcHandler:
            def answer_all(messages: AsyncIterable[MessageT], context: Context) -> AsyncIterator[AnswerT]:
                asked = _asked(context)
                return answer_in_order(
                    messages, lambda message: answer(message, asked), self._settings.max_stream_in_flight
                )

            return answer_all

        handlers: dict[str, dict[str, RpcHandler]] = {
            "Info": {"Info": one(self.info)},
            "Embed": {
                "Embed": one(self.embed),
                "EmbedStream": many(self.embed),
                "EmbedSparse": one(self.embed_sparse),
                "EmbedSparseStream": many(self.embed_sparse),
                "EmbedAll": one(self.embed_all),
                "EmbedAllStream": many(self.embed_all),
            },
            "Predict": {
                "Predict": one(self.predict),
                "PredictPair": one(self.predict_pair),
                "PredictStream": many(self.predict),
                "PredictPairStream": many(self.predict_pair),
            },
            "Rerank": {"Rerank": one(self.rerank), "RerankStream": one(self.rerank_stream)},
            "Tokenize": {
                "Tokenize": one(self.tokenize),
                "TokenizeStream": many(self.tokenize),
                "Decode": one(self.decode),
                "DecodeStream": many(self.decode),
            },
        }
        return [pair for name, service in SERVICES.items() for pair in handlers_of(service, handlers[name], self._rpc)]

    def _rpc(self, method: MethodDescriptor) -> Rpc:
        """An rpc whose messages have one input at most."""
        return Rpc.of(method, is_work=method.name != "Info", max_text_bytes=self._settings.max_input_bytes)

    async def info(self, message: tei.InfoRequest, asked: _Asked) -> tei.InfoResponse:
        """Info."""
        chosen = self._models.choose(asked.model)
        model = self._catalog.get_model(GetModelRequest(**chosen._asdict())).model
        return tei.InfoResponse(
            version=__version__,
            model_id=model.name,
            model_sha=model.digest,
            model_dtype=model.dtype,
            model_type=_MODEL_TYPES.get(model.task, tei.MODEL_TYPE_EMBEDDING),
            max_concurrent_requests=self._settings.max_requests_in_flight,
            max_input_length=model.max_tokens,
            max_batch_tokens=self._settings.max_tokens_in_flight,
            max_client_batch_size=self._settings.max_batch_items,
            tokenization_workers=1,
        )

    async def embed(self, message: tei.EmbedRequest, asked: _Asked) -> tei.EmbedResponse:
        """Embed."""
        input = SentenceEmbeddingInput(
            text=message.inputs,
            prompt_name=message.prompt_name,
            skip_normalize=message.HasField("normalize") and not message.normalize,
            dimensions=message.dimensions,
            truncation=_truncation(message),
        )
        result = await self._infer(asked, TaskInput(sentence_embedding=input), Spans.TEI_EMBED)
        response = tei.EmbedResponse()
        write_numbers(float32_bytes(result.result.message.sentence_embedding), response)
        _write_metadata(result, len(message.inputs), response.metadata)
        return response

    async def embed_sparse(self, message: tei.EmbedSparseRequest, asked: _Asked) -> tei.EmbedSparseResponse:
        """EmbedSparse."""
        input = SparseEmbeddingInput(
            text=message.inputs, prompt_name=message.prompt_name, truncation=_truncation(message)
        )
        result = await self._infer(asked, TaskInput(sparse_embedding=input), Spans.TEI_EMBED_SPARSE)
        response = tei.EmbedSparseResponse()
        for one in result.result.message.sparse_embedding.weights:
            response.sparse_embeddings.add(index=one.token_id, value=one.weight)
        _write_metadata(result, len(message.inputs), response.metadata)
        return response

    async def embed_all(self, message: tei.EmbedAllRequest, asked: _Asked) -> tei.EmbedAllResponse:
        """EmbedAll."""
        _refuse_prompt(message)
        input = FeatureExtractionInput(text=message.inputs, truncation=_truncation(message))
        result = await self._infer(asked, TaskInput(feature_extraction=input), Spans.TEI_EMBED_ALL)
        response = tei.EmbedAllResponse()
        for vector in token_vectors(result.result.message.feature_extraction):
            write_numbers(vector.tobytes(), response.token_embeddings.add())
        _write_metadata(result, len(message.inputs), response.metadata)
        return response

    async def predict(self, message: tei.PredictRequest, asked: _Asked) -> tei.PredictResponse:
        """Predict."""
        return await self._predict(message, asked, Spans.TEI_PREDICT, message.inputs)

    async def predict_pair(self, message: tei.PredictPairRequest, asked: _Asked) -> tei.PredictResponse:
        """PredictPair."""
        if len(message.inputs) != 2:
            raise InvalidInput("inputs", f"{len(message.inputs)} texts, must be a pair")
        check_second("inputs", message.inputs[1:])
        return await self._predict(message, asked, Spans.TEI_PREDICT_PAIR, *message.inputs)

    async def rerank(self, message: tei.RerankRequest, asked: _Asked) -> tei.RerankResponse:
        """Rerank."""
        input = RerankInput(
            query=message.query, texts=message.texts, function=_function(message), truncation=_truncation(message)
        )
        result = await self._infer(asked, TaskInput(rerank=input), Spans.TEI_RERANK)
        response = tei.RerankResponse()
        for one in result.result.message.rerank.texts:
            text = message.texts[one.index] if message.return_text else None
            response.ranks.add(index=one.index, score=one.score, text=text)
        chars = sum(map(len, message.texts), len(message.query) * len(message.texts))
        _write_metadata(result, chars, response.metadata)
        return response

    async def rerank_stream(
        self, messages: AsyncIterable[tei.RerankStreamRequest], asked: _Asked
    ) -> tei.RerankResponse:
        """RerankStream. The options of the first message count."""
        whole, size_bytes = tei.RerankRequest(), 0
        async for message in messages:
            if not whole.texts:
                whole.query, whole.truncate, whole.raw_scores = message.query, message.truncate, message.raw_scores
                whole.return_text, whole.truncation_direction = message.return_text, message.truncation_direction
            elif message.query != whole.query:
                raise InvalidInput("query", "must be the same in every message of a stream")
            if len(whole.texts) == MAX_TEXTS:
                raise InvalidInput("texts", f"more than {MAX_TEXTS} texts, the limit")
            size_bytes += message.ByteSize()
            if size_bytes > self._settings.max_input_bytes:
                limit = self._settings.max_input_bytes
                raise InvalidInput("texts", f"more than {limit} bytes, the limit (the gateway's max_input_bytes)")
            whole.texts.append(message.text)
        return await self.rerank(whole, asked)

    async def tokenize(self, message: tei.EncodeRequest, asked: _Asked) -> tei.EncodeResponse:
        """Tokenize."""
        _refuse_prompt(message)
        input = TokenizationInput(text=message.inputs, skip_special_tokens=not message.add_special_tokens)
        result = await self._infer(asked, TaskInput(tokenization=input), Spans.TEI_TOKENIZE)
        tokens = result.result.message.tokenization.tokens
        response = tei.EncodeResponse()
        for token, (start, stop) in zip(tokens, token_places(message.inputs, tokens), strict=True):
            response.tokens.add(id=token.token_id, text=token.text, special=token.is_special, start=start, stop=stop)
        return response

    async def decode(self, message: tei.DecodeRequest, asked: _Asked) -> tei.DecodeResponse:
        """Decode."""
        input = DetokenizationInput(token_ids=message.ids, skip_special_tokens=message.skip_special_tokens)
        result = await self._infer(asked, TaskInput(detokenization=input), Spans.TEI_DECODE)
        return tei.DecodeResponse(text=result.result.message.detokenization.text)

    async def _predict(
        self,
        message: tei.PredictRequest | tei.PredictPairRequest,
        asked: _Asked,
        span: Name,
        text: str,
        text_pair: str = "",
    ) -> tei.PredictResponse:
        asked = asked._replace(model=self._models.choose(asked.model, "text_classification"))
        input = TextClassificationInput(
            text=text,
            text_pair=text_pair,
            top_k=len(self._catalog.spec(*asked.model).labels),
            function=_function(message),
            truncation=_truncation(message),
        )
        result = await self._infer(asked, TaskInput(text_classification=input), span)
        response = tei.PredictResponse()
        for one in result.result.message.text_classification.labels:
            response.predictions.add(score=one.score, label=one.label)
        _write_metadata(result, len(text) + len(text_pair), response.metadata)
        return response

    async def _infer(self, asked: _Asked, input: TaskInput, span: Name) -> InferenceResult:
        call = asked.call.for_request(new_request_id(), asked.priority)
        model = self._models.choose(asked.model, input.WhichOneof("task") or "")
        return await self._inference.one(call, model, input, _FIELDS, span)


def _asked(context: Context) -> _Asked:
    metadata = metadata_of(context, (MODEL_FIELD, VERSION_FIELD, PRIORITY_FIELD))
    model = ModelName(metadata.get(MODEL_FIELD, ""), metadata.get(VERSION_FIELD, ""))
    return _Asked(call_of(context), read_priority(metadata.get(PRIORITY_FIELD, "")), model)


def _refuse_prompt(message: tei.EmbedAllRequest | tei.EncodeRequest) -> None:
    if message.HasField("prompt_name"):
        raise InvalidInput("prompt_name", "is not supported")


def _truncation(
    message: tei.EmbedRequest
    | tei.EmbedAllRequest
    | tei.EmbedSparseRequest
    | tei.PredictRequest
    | tei.PredictPairRequest
    | tei.RerankRequest,
) -> "Truncation.ValueType":
    return truncation_of(message.truncate, "left" if message.truncation_direction == _LEFT else "right")


def _function(message: tei.PredictRequest | tei.PredictPairRequest | tei.RerankRequest) -> "ScoreFunction.ValueType":
    return ScoreFunction.SCORE_FUNCTION_NONE if message.raw_scores else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED


def _write_metadata(result: InferenceResult, chars: int, metadata: tei.Metadata) -> None:
    timings = result.timings
    metadata.compute_chars, metadata.compute_tokens = chars, result.usage.tokens
    metadata.total_time_ns, metadata.tokenization_time_ns = timings.total_ns, timings.preprocess_ns
    metadata.queue_time_ns, metadata.inference_time_ns = timings.predict_queue_ns, timings.predict_compute_ns
