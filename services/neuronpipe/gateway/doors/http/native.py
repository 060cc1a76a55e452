"""neuronpipe.api.v1 in JSON: an InferRequest, and the InferResponse with its timings and usage."""

from dataclasses import asdict

from google.protobuf.json_format import MessageToDict

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse, StageTimings, Usage
from neuronpipe.core.names import Spans
from neuronpipe.core.packed import pack_input
from neuronpipe.gateway.doors.http.bodies import write_body
from neuronpipe.gateway.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.gateway.doors.http.messages import message_body
from neuronpipe.gateway.doors.vectors import vector
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult
from neuronpipe.gateway.pipeline import Pipeline

INFER = Route(
    "POST",
    "/v1/infer",
    "neuronpipe: one input of any task, with timings and usage",
    message_body(InferRequest.DESCRIPTOR),
    message_body(InferResponse.DESCRIPTOR),
)
ROUTES = (INFER,)


def native_handlers(pipeline: Pipeline) -> dict[str, HttpHandler]:
    """The handler, by route."""

    async def infer(request: HttpRequest) -> HttpResponse:
        message = InferRequest(**request.body.arguments())
        call = request.call.for_request(message.request_id or request.call.request_id, message.priority)
        result = await pipeline.infer(
            InferenceRequest(call, message.model, message.version, pack_input(message.input), message.cache_control),
            Spans.HTTP_REQUEST,
        )
        return HttpResponse(write_body(_response(result)))

    return {INFER.key: infer}


def _response(result: InferenceResult) -> dict[str, object]:
    """What `neuronpipe infer` prints."""
    answer = result.result.message
    is_vector = answer.HasField("sentence_embedding")
    message = InferResponse(
        model=result.model.name,
        version=str(result.model.version),
        request_id=result.request_id,
        result=None if is_vector else answer,
        timings=StageTimings(**asdict(result.timings)),
        usage=Usage(**asdict(result.usage)),
    )
    written: dict[str, object] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    if is_vector:  # json_format takes a hundred times as long for its numbers
        written["result"] = {"sentence_embedding": {"embedding": vector(answer.sentence_embedding)}}
    return written
