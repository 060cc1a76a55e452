"""neuronpipe.api.v1 in JSON: an InferRequest, its InferResponse, and the messages of Generate as events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from neuronpipe.api.v1.inference_pb2 import GenerateChunk, GenerateResponse, InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.core.packed import pack_input
from neuronpipe.core.task_inputs import GENERATING
from neuronpipe.doors.http.bodies import write_body, write_list
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.messages import message_body
from neuronpipe.doors.http.problems import PROBLEM_DETAILS
from neuronpipe.doors.inference import Inference, of_results
from neuronpipe.doors.text_stream import begun
from neuronpipe.doors.vectors import vector
from neuronpipe.gateway.requests import GeneratedPart, InferenceRequest, InferenceResult, TextEvent

_post = partial(Route, "POST", takes=message_body(InferRequest.DESCRIPTOR))
INFER = _post(
    "/v1/infer",
    "neuronpipe: one input of any task, with timings and usage",
    gives=message_body(InferResponse.DESCRIPTOR),
)
GENERATE = _post(
    "/v1/generate",
    "neuronpipe: a generated text as events: its start, its parts, and the response of /v1/infer",
    gives=message_body(GenerateResponse.DESCRIPTOR),
)
# Largest result written on the event loop: json_format takes 20 µs per message, so a thread writes more messages.
_LARGE_BYTES = 8 << 10


async def _infer(inference: Inference, request: HttpRequest) -> HttpResponse:
    result = await inference.pipeline.infer(await _read(request), Spans.HTTP_REQUEST)
    body = await of_results([result], lambda: write_body(_response(result)), large_bytes=_LARGE_BYTES)
    return HttpResponse(body)


async def _generate(inference: Inference, request: HttpRequest) -> HttpResponse:
    inference_request = await _read(request)
    if inference_request.input.message.WhichOneof("task") not in GENERATING:
        raise InvalidInput("input", f"must be of a task that generates: {', '.join(GENERATING)}")
    events = await begun(inference.pipeline.generate(inference_request, Spans.HTTP_REQUEST))
    return event_response(_values(events), PROBLEM_DETAILS)


ANSWERS: Answers[Inference] = [(INFER, _infer), (GENERATE, _generate)]


async def _read(request: HttpRequest) -> InferenceRequest:
    message = await request.make(lambda: InferRequest(**request.body.arguments()))
    return to_inference_request(request.call, message)


def to_inference_request(call: Call, message: InferRequest) -> InferenceRequest:
    call = call.for_request(message.request_id or call.request_id, message.priority)
    return InferenceRequest(call, message.model, message.version, pack_input(message.input), message.cache_control)


async def _values(events: AsyncGenerator[TextEvent, None]) -> AsyncGenerator[dict[str, object], None]:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, InferenceResult):
                yield {"response": _response(event)}
            elif isinstance(event, GeneratedPart):
                chunk = GenerateChunk(
                    sequence=event.sequence, text=event.text, token_ids=event.token_ids, logprobs=event.logprobs
                )
                yield {"chunk": _written(chunk)}
            else:
                yield {"start": _written(event)}


def response_message(result: InferenceResult, answer: TaskResult | None) -> InferResponse:
    """Returns the response with an answer, its timings and its usage."""
    return InferResponse(
        model=result.model.name,
        version=str(result.model.version),
        request_id=result.request_id,
        result=answer,
        timings=result.timings,
        usage=result.usage,
    )


def _response(result: InferenceResult) -> dict[str, object]:
    """Returns the response in the form that `neuronpipe infer` prints."""
    answer = result.result.message
    task = answer.WhichOneof("task")
    is_list = task in ("sentence_embedding", "tokenization")
    written = _written(response_message(result, None if is_list else answer))
    if task == "sentence_embedding":  # json_format takes 100 times as long
        written["result"] = {task: {"embedding": vector(answer.sentence_embedding)}}
    elif task == "tokenization":  # there may be hundreds of thousands of tokens
        written["result"] = {task: {"tokens": write_list(map(_written, answer.tokenization.tokens))}}
    return written


def _written(message: Message) -> dict[str, object]:
    written: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return written
