"""tei.v1, the gRPC API of text-embeddings-inference (TEI), on the gateway's own port.

TEI serves one model; here metadata names one of several models, or a default model answers (doors/inference.py).
"""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from neuronpipe import __version__
from neuronpipe.api.tei.v1 import tei_pb2 as tei
from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.models_pb2 import GetModelRequest, Model
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.tensors import float_bytes, write_floats
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors import inference as doors
from neuronpipe.doors.inference import Inference, ModelCall, ModelName, score_function, truncation_of
from neuronpipe.doors.vectors import token_places, token_vectors
from neuronpipe.gateway.many import answer_in_order
from neuronpipe.gateway.requests import InferenceResult
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, call_of, handlers_of, metadata_of
from neuronpipe.tasks.many_texts import MAX_TEXTS

TeiResponseT = TypeVar("TeiResponseT")

SERVICES: Mapping[str, ServiceDescriptor] = tei.DESCRIPTOR.services_by_name
_FIELDS = {"text": "inputs", "text_pair": "inputs", "token_ids": "ids", "truncation": "truncate"}
_MODEL_TYPES = {
    "text_classification": tei.MODEL_TYPE_CLASSIFIER,
    "zero_shot_classification": tei.MODEL_TYPE_CLASSIFIER,
    "rerank": tei.MODEL_TYPE_RERANKER,
}
_METADATA = (doors.MODEL_FIELD, doors.VERSION_FIELD, doors.PRIORITY_FIELD)


class _TeiCall(NamedTuple):
    """The values that all requests of one rpc share."""

    inference: Inference
    call: Call
    priority: "Priority.ValueType"
    model: ModelName

    @classmethod
    def of(cls, inference: Inference, context: Context) -> "_TeiCall":
        """Reads the metadata of an rpc. Raises InvalidInput."""
        metadata = metadata_of(context, _METADATA)
        model, version, priority = (metadata.get(name, "") for name in _METADATA)
        return cls(inference, call_of(context), doors.read_priority(priority), ModelName(model, version))

    async def infer(self, input: tasks.TaskInput, span: Name) -> InferenceResult:
        """Returns the result of an input, from the model of the rpc."""
        call = self.call.for_request(new_request_id(), self.priority)
        model = self.inference.choose(self.model, input.WhichOneof("task") or "")
        return await self.inference.infer_one(ModelCall(call, model, _FIELDS), input, span)


def tei_handlers(inference: Inference) -> RpcHandlers:
    """Returns all services, with handlers that call the inference."""
    settings = inference.settings

    def rpc(method: MethodDescriptor) -> Rpc:
        """Returns an rpc whose messages have at most one input."""
        return Rpc.of(method, is_work=method.name != "Info", max_text_bytes=settings.max_input_bytes)

    def handler(method: MethodDescriptor) -> RpcHandler:
        if method.name in _ANSWERS:
            answer = _ANSWERS[method.name]
            return lambda message, context: answer(_TeiCall.of(inference, context), message)
        answer_each = _ANSWERS[method.name.removesuffix("Stream")]

        def answer_all(messages: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
            call = _TeiCall.of(inference, context)
            return answer_in_order(messages, partial(answer_each, call), settings.max_stream_in_flight)

        return answer_all

    return [
        pair
        for service in SERVICES.values()
        for pair in handlers_of(service, {method.name: handler(method) for method in service.methods}, rpc)
    ]


async def _info(call: _TeiCall, message: tei.InfoRequest) -> tei.InfoResponse:
    model, info = read_info(call.inference, call.model)
    return tei.InfoResponse(
        **info,
        model_type=_MODEL_TYPES.get(model.task, tei.MODEL_TYPE_EMBEDDING),
        max_client_batch_size=call.inference.settings.max_batch_items,
        tokenization_workers=1,
    )


def read_info(inference: Inference, name: ModelName) -> tuple[Model, dict[str, Any]]:
    """Returns the model that a caller names, and the fields of TEI's info that are the same over gRPC and HTTP."""
    model = inference.catalog.get_model(GetModelRequest(**inference.choose(name)._asdict())).model
    settings = inference.settings
    return model, {
        "version": __version__,
        "model_id": model.name,
        "model_sha": model.digest,
        "model_dtype": model.dtype,
        "max_concurrent_requests": settings.max_requests_in_flight,
        "max_input_length": model.max_tokens,
        "max_batch_tokens": settings.max_tokens_in_flight,
    }


async def _embed(call: _TeiCall, message: tei.EmbedRequest) -> tei.EmbedResponse:
    input = tasks.SentenceEmbeddingInput(
        text=message.inputs,
        prompt_name=message.prompt_name,
        skip_normalize=message.HasField("normalize") and not message.normalize,
        dimensions=message.dimensions,
        truncation=_truncation(message),
    )
    result = await call.infer(tasks.TaskInput(sentence_embedding=input), Spans.TEI_EMBED)
    response = tei.EmbedResponse()
    write_floats(float_bytes(result.result.message.sentence_embedding), response)
    return _with_metadata(response, result, len(message.inputs))


async def _embed_sparse(call: _TeiCall, message: tei.EmbedSparseRequest) -> tei.EmbedSparseResponse:
    input = tasks.SparseEmbeddingInput(
        text=message.inputs, prompt_name=message.prompt_name, truncation=_truncation(message)
    )
    result = await call.infer(tasks.TaskInput(sparse_embedding=input), Spans.TEI_EMBED_SPARSE)
    response = tei.EmbedSparseResponse()
    for weight in result.result.message.sparse_embedding.weights:
        response.sparse_embeddings.add(index=weight.token_id, value=weight.weight)
    return _with_metadata(response, result, len(message.inputs))


async def _embed_all(call: _TeiCall, message: tei.EmbedAllRequest) -> tei.EmbedAllResponse:
    _refuse_prompt(message)
    input = tasks.FeatureExtractionInput(text=message.inputs, truncation=_truncation(message))
    result = await call.infer(tasks.TaskInput(feature_extraction=input), Spans.TEI_EMBED_ALL)
    response = tei.EmbedAllResponse()
    for vector in token_vectors(result.result.message.feature_extraction):
        write_floats(vector.tobytes(), response.token_embeddings.add())
    return _with_metadata(response, result, len(message.inputs))


async def _predict(call: _TeiCall, message: tei.PredictRequest) -> tei.PredictResponse:
    return await _classify(call, message, Spans.TEI_PREDICT, message.inputs)


async def _predict_pair(call: _TeiCall, message: tei.PredictPairRequest) -> tei.PredictResponse:
    if len(message.inputs) != 2:
        raise InvalidInput("inputs", f"{len(message.inputs)} texts, must be a pair")
    doors.check_second("inputs", message.inputs[1:])
    return await _classify(call, message, Spans.TEI_PREDICT_PAIR, *message.inputs)


async def _classify(
    call: _TeiCall, message: tei.PredictRequest | tei.PredictPairRequest, span: Name, text: str, text_pair: str = ""
) -> tei.PredictResponse:
    call = call._replace(model=call.inference.choose(call.model, "text_classification"))
    input = tasks.TextClassificationInput(
        text=text,
        text_pair=text_pair,
        top_k=len(call.inference.spec(call.model).labels),
        function=score_function(message.raw_scores),
        truncation=_truncation(message),
    )
    result = await call.infer(tasks.TaskInput(text_classification=input), span)
    response = tei.PredictResponse()
    for label in result.result.message.text_classification.labels:
        response.predictions.add(score=label.score, label=label.label)
    return _with_metadata(response, result, len(text) + len(text_pair))


async def _rerank(call: _TeiCall, message: tei.RerankRequest) -> tei.RerankResponse:
    input = tasks.RerankInput(
        query=message.query,
        texts=message.texts,
        function=score_function(message.raw_scores),
        truncation=_truncation(message),
    )
    result = await call.infer(tasks.TaskInput(rerank=input), Spans.TEI_RERANK)
    response = tei.RerankResponse()
    for rank in result.result.message.rerank.texts:
        text = message.texts[rank.index] if message.return_text else None
        response.ranks.add(index=rank.index, score=rank.score, text=text)
    return _with_metadata(response, result, sum(map(len, message.texts), len(message.query) * len(message.texts)))


async def _rerank_stream(call: _TeiCall, messages: AsyncIterable[tei.RerankStreamRequest]) -> tei.RerankResponse:
    """Reranks the texts of all messages, with the options of the first message."""
    whole, size_bytes, limit = tei.RerankRequest(), 0, call.inference.settings.max_input_bytes
    async for message in messages:
        if not whole.texts:
            whole.query, whole.truncate, whole.raw_scores = message.query, message.truncate, message.raw_scores
            whole.return_text, whole.truncation_direction = message.return_text, message.truncation_direction
        elif message.query != whole.query:
            raise InvalidInput("query", "must be the same in every message of a stream")
        if len(whole.texts) == MAX_TEXTS:
            raise InvalidInput("texts", f"more than {MAX_TEXTS} texts, the limit")
        size_bytes += message.ByteSize()
        if size_bytes > limit:
            raise InvalidInput("texts", f"more than {limit} bytes, the limit (the gateway's max_input_bytes)")
        whole.texts.append(message.text)
    return await _rerank(call, whole)


async def _tokenize(call: _TeiCall, message: tei.EncodeRequest) -> tei.EncodeResponse:
    _refuse_prompt(message)
    input = tasks.TokenizationInput(text=message.inputs, skip_special_tokens=not message.add_special_tokens)
    result = await call.infer(tasks.TaskInput(tokenization=input), Spans.TEI_TOKENIZE)
    tokens = result.result.message.tokenization.tokens
    response = tei.EncodeResponse()
    for token, (start, stop) in zip(tokens, token_places(message.inputs, tokens), strict=True):
        response.tokens.add(id=token.token_id, text=token.text, special=token.is_special, start=start, stop=stop)
    return response


async def _decode(call: _TeiCall, message: tei.DecodeRequest) -> tei.DecodeResponse:
    input = tasks.DetokenizationInput(token_ids=message.ids, skip_special_tokens=message.skip_special_tokens)
    result = await call.infer(tasks.TaskInput(detokenization=input), Spans.TEI_DECODE)
    return tei.DecodeResponse(text=result.result.message.detokenization.text)


# Methods → the functions that answer them. METHODStream answers each message as METHOD does, except RerankStream.
_ANSWERS: Mapping[str, Callable[[_TeiCall, Any], Awaitable[Any]]] = {
    "Info": _info,
    "Embed": _embed,
    "EmbedSparse": _embed_sparse,
    "EmbedAll": _embed_all,
    "Predict": _predict,
    "PredictPair": _predict_pair,
    "Rerank": _rerank,
    "RerankStream": _rerank_stream,
    "Tokenize": _tokenize,
    "Decode": _decode,
}


def _refuse_prompt(message: tei.EmbedAllRequest | tei.EncodeRequest) -> None:
    if message.HasField("prompt_name"):
        raise InvalidInput("prompt_name", "is not supported")


def _truncation(message: Any) -> "tasks.Truncation.ValueType":
    is_left = message.truncation_direction == tei.TRUNCATION_DIRECTION_LEFT
    return truncation_of(message.truncate or None, "left" if is_left else "right")


def _with_metadata(response: TeiResponseT, result: InferenceResult, chars: int) -> TeiResponseT:
    """Returns the response with TEI's metadata. `chars`: characters of the texts."""
    timings, metadata = result.timings, cast(Any, response).metadata
    metadata.compute_chars, metadata.compute_tokens = chars, result.usage.tokens
    metadata.total_time_ns, metadata.tokenization_time_ns = timings.total_ns, timings.preprocess_ns
    metadata.queue_time_ns, metadata.inference_time_ns = timings.predict_queue_ns, timings.predict_compute_ns
    return response
