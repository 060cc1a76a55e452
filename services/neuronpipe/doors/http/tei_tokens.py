"""TEI's /tokenize and /decode."""

from typing import Annotated

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import DetokenizationInput, TaskInput, TokenizationInput
from neuronpipe.doors.choice import ModelChoice
from neuronpipe.doors.http.bodies import Body, Many, TokenIds, Unsupported, write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.token_places import token_places


class Tokenize(Body):
    model: str | None = None
    inputs: Annotated[str | Many[str], Field(description="a text, or several")]
    add_special_tokens: bool = True
    prompt_name: Unsupported = None


class Decode(Body):
    model: str | None = None
    ids: Annotated[TokenIds | Many[TokenIds], Field(description="the tokens of a text, or of several")]
    skip_special_tokens: bool = True


class TokenOfText(Body):
    """`start` and `stop`: the place in the text in bytes of UTF-8, null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


_QUERY = {"model": "the model, where the body names none and several could answer"}
TOKENIZE = Route(
    "POST", "/tokenize", "TEI: the tokens of each text", Tokenize, list[list[TokenOfText]], TEI_ERROR, query=_QUERY
)
DECODE = Route("POST", "/decode", "TEI: the text of each list of tokens", Decode, list[str], TEI_ERROR, query=_QUERY)
ROUTES = (TOKENIZE, DECODE)


def tei_token_handlers(inference: Inference, models: ModelChoice) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def tokenize(request: HttpRequest) -> HttpResponse:
        body: Tokenize = request.body
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        model = models.choose(request.model(body.model), "tokenization")
        results = await inference.each(
            request.call,
            model,
            [
                TaskInput(tokenization=TokenizationInput(text=text, skip_special_tokens=not body.add_special_tokens))
                for text in texts
            ],
            "inputs",
            lambda index: {"text": f"inputs[{index}]" if isinstance(body.inputs, list) else "inputs"},
        )
        answer = []
        for text, one in zip(texts, results, strict=True):
            tokens = one.result.message.tokenization.tokens
            places = token_places(text, tokens)
            answer.append(
                [
                    {
                        "id": token.token_id,
                        "text": token.text,
                        "special": token.is_special,
                        "start": start,
                        "stop": stop,
                    }
                    for token, (start, stop) in zip(tokens, places, strict=True)
                ]
            )
        return HttpResponse(write_body(answer))

    async def decode(request: HttpRequest) -> HttpResponse:
        body: Decode = request.body
        is_list = bool(body.ids) and isinstance(body.ids[0], list)
        several = body.ids if is_list else [body.ids]
        model = models.choose(request.model(body.model), "detokenization")
        results = await inference.each(
            request.call,
            model,
            [
                TaskInput(
                    detokenization=DetokenizationInput(
                        token_ids=ids,  # type: ignore[arg-type] # lists, as is_list says
                        skip_special_tokens=body.skip_special_tokens,
                    )
                )
                for ids in several
            ],
            "ids",
            lambda index: {"token_ids": f"ids[{index}]" if is_list else "ids"},
        )
        return HttpResponse(write_body([one.result.message.detokenization.text for one in results]))

    return {TOKENIZE.key: tokenize, DECODE.key: decode}
