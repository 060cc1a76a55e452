"""The HTTP API of text-generation-inference: /generate and /generate_stream.

openai_text.py answers its /v1/chat/completions, and huggingface.py its /.
"""

from functools import partial
from typing import Any, NotRequired

from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.huggingface_bodies import Generate
from neuronpipe.doors.http.huggingface_texts import answer_tokens, one_text_fields, read_one_prompt, write_text
from neuronpipe.doors.http.problems import TGI_ERROR
from neuronpipe.doors.inference import Inference, ModelCall

_DETAILS = dict[str, Any] | None
_TEXT = named("Generated", generated_text=str, details=NotRequired[_DETAILS])
_TOKEN = named("GeneratedToken", index=int, token=dict[str, Any], generated_text=str | None, details=_DETAILS)
_QUERY = {"model": "the model, where the body names none and several generate text"}
_post = partial(Route, "POST", takes=Generate, error_form=TGI_ERROR, query=_QUERY)
GENERATE = _post("/generate", "TGI: continues a text", gives=_TEXT)
GENERATE_STREAM = _post("/generate_stream", "TGI: the same as events, one for each token", gives=_TOKEN)


async def _generate(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Generate = request.body
    if body.stream:
        raise InvalidInput("stream", "is not supported; use /generate_stream")
    model = inference.choose(request.model(body.model), "text_generation")
    input = read_one_prompt(body.inputs, body, inference.spec(model))
    result = await inference.infer_one(ModelCall(request.call, model, one_text_fields(body)), input)
    return HttpResponse(write_body(write_text(result.texts[0], body.inputs, body)))


async def _generate_stream(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Generate = request.body
    spec = inference.spec(inference.choose(request.model(body.model), "text_generation"))
    return await answer_tokens(inference, request, spec, body, body.inputs)


ANSWERS: Answers[Inference] = [(GENERATE, _generate), (GENERATE_STREAM, _generate_stream)]
