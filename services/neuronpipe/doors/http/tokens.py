"""The tokens of texts and the texts of tokens, as TEI and vLLM have them; /tokenize is a path of both."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from neuronpipe.api.v1.tasks_pb2 import DetokenizationInput, TaskInput, Token, TokenizationInput
from neuronpipe.doors.http.bodies import Answer, Body, Many, TokenIds, only, texts_of, write_body, write_list
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OPENAI_ERROR, TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, of_results
from neuronpipe.doors.vectors import token_places
from neuronpipe.gateway.catalog import Catalog


class Tokenize(Body):
    model: str | None = None
    inputs: Annotated[str | Many[str], Field(description="a text, or several")]
    add_special_tokens: bool = True


class TokenizePrompt(Body):
    """vLLM's."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: Annotated[Any, only(False)] = None


class Decode(Body):
    model: str | None = None
    ids: Annotated[TokenIds | Many[TokenIds], Field(description="the tokens of a text, or of several")]
    skip_special_tokens: bool = True


class Detokenize(Body):
    """vLLM's."""

    model: str | None = None
    tokens: TokenIds


class TokenOfText(Answer):
    """`start` and `stop`: the place in the text in bytes of UTF-8, null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class PromptTokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(Answer):
    prompt: str


def _kind(body: Any) -> str:
    is_tei = {"prompt", "messages"}.isdisjoint(body) if isinstance(body, dict) else isinstance(body, Tokenize)
    return "tei" if is_tei else "vllm"


_EITHER = Annotated[
    Annotated[Tokenize, Tag("tei")] | Annotated[TokenizePrompt, Tag("vllm")],
    Discriminator(_kind),
    Field(description="with `inputs` it is TEI's, with `prompt` vLLM's"),
]
_QUERY = {"model": "the model, where the body names none and several have the task"}
TOKENIZE = Route(
    "POST",
    "/tokenize",
    "TEI: the tokens of each text; vLLM: the ids of a prompt's tokens",
    _EITHER,
    list[list[TokenOfText]] | PromptTokens,
    TEI_ERROR,
    query=_QUERY,
)
DECODE = Route("POST", "/decode", "TEI: the text of each list of tokens", Decode, list[str], TEI_ERROR, query=_QUERY)
DETOKENIZE = Route(
    "POST", "/detokenize", "vLLM: the text of tokens", Detokenize, Detokenized, OPENAI_ERROR, query=_QUERY
)


def token_handlers(inference: Inference, models: ModelChoice, catalog: Catalog) -> HttpHandlers:
    """The routes with their handlers."""

    async def tokenize(request: HttpRequest) -> HttpResponse:
        body: Tokenize | TokenizePrompt = request.body
        model = models.choose(request.model(body.model), "tokenization")
        name, given = ("prompt", body.prompt) if isinstance(body, TokenizePrompt) else ("inputs", body.inputs)
        texts = texts_of(given)

        def make(text: str) -> TaskInput:
            input = TokenizationInput(text=text, skip_special_tokens=not body.add_special_tokens)
            return TaskInput(tokenization=input)

        results = await inference.each(request.call, model, texts, make, name, partial(_fields, name, given is texts))

        def write() -> bytes:
            several = [one.result.message.tokenization.tokens for one in results]
            if isinstance(body, TokenizePrompt):
                ids = [one.token_id for one in several[0]]
                limits = {"count": len(ids), "max_model_len": catalog.spec(*model).max_tokens}
                return write_body({**limits, "tokens": ids, "token_strs": None})
            return write_body([write_list(_written(*one)) for one in zip(texts, several, strict=True)])

        return HttpResponse(await of_results(results, write))

    async def decode(request: HttpRequest) -> HttpResponse:
        body: Decode = request.body
        several: Any = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
        texts = await texts_for(request, several, "ids", is_list=several is body.ids, skips=body.skip_special_tokens)
        return HttpResponse(write_body(texts))

    async def detokenize(request: HttpRequest) -> HttpResponse:
        [text] = await texts_for(request, [request.body.tokens], "tokens", is_list=False, skips=False)
        return HttpResponse(write_body({"prompt": text}))

    async def texts_for(
        request: HttpRequest, several: Sequence[list[int]], name: str, *, is_list: bool, skips: bool
    ) -> list[str]:
        model = models.choose(request.model(request.body.model), "detokenization")

        def make(ids: list[int]) -> TaskInput:
            return TaskInput(detokenization=DetokenizationInput(token_ids=ids, skip_special_tokens=skips))

        results = await inference.each(request.call, model, several, make, name, partial(_fields, name, is_list))
        return [one.result.message.detokenization.text for one in results]

    return [(TOKENIZE, tokenize), (DECODE, decode), (DETOKENIZE, detokenize)]


def _written(text: str, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
    for token, (start, stop) in zip(tokens, token_places(text, tokens), strict=True):
        yield {"id": token.token_id, "text": token.text, "special": token.is_special, "start": start, "stop": stop}


def _fields(name: str, is_list: bool, index: int) -> dict[str, str]:
    return dict.fromkeys(("text", "token_ids"), f"{name}[{index}]" if is_list else name)
