"""The tokens of texts and the texts of tokens, as TEI and vLLM have them; /tokenize is a path of both."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import DetokenizationInput, TaskInput, Token
from neuronpipe.doors.http.bodies import write_body, write_list
from neuronpipe.doors.http.body_types import Many, ModelBody, TokenIds, either, only, texts_of
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR, TEI_ERROR
from neuronpipe.doors.inference import Inference, Inputs, of_results
from neuronpipe.doors.vectors import text_input, token_places


class Tokenize(ModelBody):
    inputs: Annotated[str | Many[str], Field(description="a text, or several")]
    add_special_tokens: bool = True


class TokenizePrompt(ModelBody):
    """The body of vLLM."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: Annotated[Any, only(False)] = None


class Decode(ModelBody):
    ids: Annotated[TokenIds | Many[TokenIds], Field(description="the tokens of a text, or of several")]
    skip_special_tokens: bool = True


class Detokenize(ModelBody):
    """The body of vLLM."""

    tokens: TokenIds


_PLACE = "`start` and `stop`: the place in the text in bytes of UTF-8, null for a special token."
_TOKEN: Any = named("TokenOfText", _PLACE, id=int, text=str, special=bool, start=int | None, stop=int | None)
_PROMPT_TOKENS: Any = named("PromptTokens", count=int, max_model_len=int, tokens=list[int], token_strs=None)
_PROMPT = named("Detokenized", prompt=str)
_EITHER = either(Tokenize, TokenizePrompt, {"prompt", "messages"}, "TEI's with `inputs`, vLLM's with `prompt`")
_post = partial(Route, "POST", query={"model": "the model, where the body names none and several have the task"})
_SUMMARY = "TEI: the tokens of each text; vLLM: the ids of a prompt's tokens"
TOKENIZE = _post("/tokenize", _SUMMARY, _EITHER, list[list[_TOKEN]] | _PROMPT_TOKENS, TEI_ERROR)
DECODE = _post("/decode", "TEI: the text of each list of tokens", Decode, list[str], TEI_ERROR)
DETOKENIZE = _post("/detokenize", "vLLM: the text of tokens", Detokenize, _PROMPT, OPENAI_ERROR)


async def _tokenize(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Tokenize | TokenizePrompt = request.body
    model = inference.choose(request.model(body.model), "tokenization")
    name, body_texts = ("prompt", body.prompt) if isinstance(body, TokenizePrompt) else ("inputs", body.inputs)
    texts = texts_of(body_texts)

    make = partial(text_input, "tokenization", skip_special_tokens=not body.add_special_tokens)
    inputs = Inputs(name, texts, make, {"text": f"{name}…"}, is_list=body_texts is texts)
    results = await inference.each(request.call, model, inputs)

    def write() -> bytes:
        several = [result.result.message.tokenization.tokens for result in results]
        if isinstance(body, TokenizePrompt):
            ids = [token.token_id for token in several[0]]
            limits = {"count": len(ids), "max_model_len": inference.spec(model).max_tokens}
            return write_body({**limits, "tokens": ids, "token_strs": None})
        return write_body([write_list(_written(text, tokens)) for text, tokens in zip(texts, several, strict=True)])

    return HttpResponse(await of_results(results, write))


def _written(text: str, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
    for token, (start, stop) in zip(tokens, token_places(text, tokens), strict=True):
        yield {"id": token.token_id, "text": token.text, "special": token.is_special, "start": start, "stop": stop}


async def _decode(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Decode = request.body
    several: Any = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    make = partial(_detokenization, skips_special=body.skip_special_tokens)
    inputs = Inputs("ids", several, make, {"token_ids": "ids…"}, is_list=several is body.ids)
    return HttpResponse(write_body(await _texts(inference, request, inputs)))


async def _detokenize(inference: Inference, request: HttpRequest) -> HttpResponse:
    inputs = Inputs("tokens", [request.body.tokens], _detokenization, {"token_ids": "tokens"}, is_list=False)
    [text] = await _texts(inference, request, inputs)
    return HttpResponse(write_body({"prompt": text}))


def _detokenization(ids: list[int], *, skips_special: bool = False) -> TaskInput:
    return TaskInput(detokenization=DetokenizationInput(token_ids=ids, skip_special_tokens=skips_special))


async def _texts(inference: Inference, request: HttpRequest, inputs: Inputs) -> list[str]:
    model = inference.choose(request.model(request.body.model), "detokenization")
    results = await inference.each(request.call, model, inputs)
    return [result.result.message.detokenization.text for result in results]


ANSWERS: Answers[Inference] = [(TOKENIZE, _tokenize), (DECODE, _decode), (DETOKENIZE, _detokenize)]
