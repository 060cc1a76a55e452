"""OpenAI's chat completions and completions: their routes, and what their requests ask for."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NotRequired

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import DRAWING, OPTIONS, message_fields, with_drawing
from neuronpipe.doors.http import openai_text_bodies as bodies
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.openai_answers import CHAT_WRITER, COMPLETION_WRITER, answer_texts
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.http.reasoning import (
    AnswerReader,
    effort_variables,
    facts_of,
    name_unread,
    reader_of_answer,
    switched,
    thinking_of,
)
from neuronpipe.doors.http.tool_calls import ToolChoice, ToolUse
from neuronpipe.doors.http.unknown_fields import ignore
from neuronpipe.doors.inference import Inference, Inputs, ModelName, cut_fields
from neuronpipe.doors.vectors import listed
from neuronpipe.tasks.text_options import form_of

# OpenAI's default for completions.
_MAX_TOKENS = 16
_SEEDS = 1 << 64
_FIELDS = {f"options.{name}": option.openai for name, option in OPTIONS.items() if option.openai}
# Fields of a chat that are variables of the model's template.
_VARIABLES = ("add_generation_prompt", "reasoning_effort", "verbosity")
# vLLM's names of forms of a text → our options.
_FORM_OPTIONS = {"json": "json_schema", "choice": "choices"}

_OBJECT = dict[str, Any]
_CACHED = named("CachedTokens", cached_tokens=int)
_REASONING = named("ReasoningTokens", reasoning_tokens=int)
_USAGE = named(
    "TextUsage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    prompt_tokens_details=_CACHED,
    completion_tokens_details=_REASONING,
)
_CALLS = NotRequired[list[_OBJECT] | None]
_REASONED: Any = {"reasoning_content": NotRequired[str]}
_MESSAGE = named(
    "Answered", role=Literal["assistant"], content=str | None, refusal=None, tool_calls=_CALLS, **_REASONED
)


def _answer(name: str, kind: Any, choice_name: str, reasons: Any, **text: Any) -> Any:
    ends: Any = {"finish_reason": reasons, "stop_reason": NotRequired[str | int]}
    choice: Any = named(choice_name, index=int, **text, logprobs=_OBJECT | None, **ends)
    head: Any = {"id": str, "object": kind, "created": int, "model": str, "system_fingerprint": str}
    return named(name, **head, choices=list[choice], usage=_USAGE)


_CHAT_REASONS = Literal["stop", "length", "tool_calls"]
_post = partial(Route, "POST", error_form=OPENAI_ERROR)
CHAT = _post(
    "/v1/chat/completions",
    "OpenAI: the next message of a chat; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    bodies.ChatRequest,
    _answer("ChatCompletion", Literal["chat.completion"], "ChatChoice", _CHAT_REASONS, message=_MESSAGE),
)
COMPLETIONS = _post(
    "/v1/completions",
    "OpenAI: continues texts; with `stream` as events, each a chunk in JSON, the last one [DONE]",
    bodies.CompletionRequest,
    _answer("Completion", Literal["text_completion"], "CompletionChoice", Literal["stop", "length"], text=str),
)
# huggingface_hub puts OpenAI's paths behind the address of a model.
MODEL_CHAT, MODEL_COMPLETIONS = (
    replace(route, path=f"/models/{{name}}{route.path}", summary=f"Hugging Face: as {route.path} of this model")
    for route in (CHAT, COMPLETIONS)
)


async def chat(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/chat/completions."""
    body: bodies.ChatRequest = request.body
    model = _model(inference, request)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "has an effect only with logprobs")
    top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, body.max_completion_tokens or body.max_tokens, top_logprobs)
    tools = _tool_use(body)
    facts = facts_of(inference, model)
    form = "response_format" if body.response_format and body.response_format.type != "text" else ""
    tools.set_form(options, "function.strict", form, facts)
    variables = {name: value for name in _VARIABLES if (value := getattr(body, name)) is not None}
    variables |= switched(body.reasoning_effort, body.chat_template_kwargs or {})
    name_unread(facts, _read_variables(body))
    for place in bodies.unread_fields(body.messages, body.tools or (), facts.chat_template) if facts else ():
        ignore(place)

    def make(messages: Sequence[bodies.SaidMessage]) -> TaskInput:
        input = tasks.TextGenerationInput(
            messages=[message.message() for message in messages],
            tools=tools.for_template,
            template_arguments=json.dumps(variables, ensure_ascii=False) if variables else "",
            continue_final_message=bool(body.continue_final_message),
            options=options,
        )
        return TaskInput(text_generation=input)

    fields = _fields(body) | tools.fields("function.parameters", form)
    inputs = Inputs("messages", [body.messages], make, fields, is_list=False)
    has_form, thinking = bool(form_of(options)), _thinking(body)

    def new_reader() -> AnswerReader:
        begun = body.messages[-1].message().content if body.continue_final_message else ""
        return reader_of_answer(inference, model, tools, has_form=has_form, thinking=thinking, begun=begun)

    return await answer_texts(inference, request, model, CHAT_WRITER, inputs, new_reader)


async def completions(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers POST /v1/completions."""
    body: bodies.CompletionRequest = request.body
    model = _model(inference, request)
    texts = body.n or 1
    if body.best_of not in (None, texts):
        raise InvalidInput("best_of", f"{body.best_of}, must be n, {texts}: no more texts are made than asked")
    prompts, _ = listed(body.prompt)
    if body.max_tokens == 0 and not (body.echo and body.logprobs is not None):
        raise InvalidInput("max_tokens", "0, must be at least 1 without echo and logprobs")
    # A prompt is scored by the steps that generate a token behind it.
    max_tokens = _MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    options = _options(body, max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise InvalidInput("echo", "with logprobs cannot be combined with stream")
        options.prompt_logprobs = True
    elif body.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidInput("echo", "of token ids needs logprobs")
    cuts = cut_fields(body.truncate_prompt_tokens, "left")

    def make(prompt: str | Sequence[int]) -> TaskInput:
        field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        prompt_fields: dict[str, Any] = {field: prompt}
        return TaskInput(text_generation=tasks.TextGenerationInput(**prompt_fields, **cuts, options=options))

    inputs = Inputs("prompt", prompts, make, _fields(body), is_list=len(prompts) > 1)
    begins = [prompt if body.echo and isinstance(prompt, str) else "" for prompt in prompts]
    return await answer_texts(inference, request, model, COMPLETION_WRITER, inputs, _reader_of_words, begins)


def _reader_of_words() -> AnswerReader:
    return AnswerReader(ToolUse(()).reader(""))


ANSWERS: Answers[Inference] = [
    (CHAT, chat),
    (COMPLETIONS, completions),
    (MODEL_CHAT, chat),
    (MODEL_COMPLETIONS, completions),
]


def _model(inference: Inference, request: HttpRequest) -> ModelName:
    return inference.choose(request.model(request.names.get("name") or request.body.model), "text_generation")


def _read_variables(body: bodies.ChatRequest) -> dict[str, Sequence[str]]:
    """Returns the variables of the template that each field of a chat sets."""
    fields: dict[str, Sequence[str]] = {
        f"chat_template_kwargs.{name}": (name,) for name in body.chat_template_kwargs or ()
    }
    if body.reasoning_effort:
        fields["reasoning_effort"] = effort_variables(body.reasoning_effort)
    if body.verbosity:
        fields["verbosity"] = ("verbosity",)
    return fields


def _thinking(body: bodies.ChatRequest) -> str:
    """Returns the setting of the template's thinking; empty for a prompt that ends in the answer."""
    if body.continue_final_message or body.add_generation_prompt is False:
        return ""
    return thinking_of(switched(body.reasoning_effort, body.chat_template_kwargs or {}))


def _tool_use(body: bodies.ChatRequest) -> ToolUse:
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    return ToolUse.of(tools, _tool_choice(body.tool_choice), has_several=body.parallel_tool_calls is not False)


def _tool_choice(chosen: str | bodies.ChosenTool | bodies.AllowedChoice | None) -> ToolChoice:
    if isinstance(chosen, bodies.ChosenTool):
        return ToolChoice(function=chosen.function.name, field="tool_choice.function.name")
    if isinstance(chosen, bodies.AllowedChoice):
        names = [tool.function.name for tool in chosen.allowed_tools.tools]
        return ToolChoice(chosen.allowed_tools.mode, field="tool_choice.allowed_tools", allowed=names)
    return ToolChoice(chosen)


def _fields(body: bodies.CompletionOptions) -> dict[str, str]:
    """Returns a request's names of fields."""
    names = _FIELDS | {f"options.{option}": field for option, field, _ in _forms(body)}
    limit, best = "max_tokens", "logprobs"
    if isinstance(body, bodies.ChatRequest):
        limit = "max_completion_tokens" if body.max_completion_tokens else limit
        best = "top_logprobs" if body.top_logprobs else best
        names |= {"prompt": "messages"}
    else:
        names |= {"prompt": "prompt…"} | dict.fromkeys(("truncation", "truncation_tokens"), "truncate_prompt_tokens")
    names |= {"template_arguments": "chat_template_kwargs", "prompt_token_ids": "prompt"}
    return names | {"options.max_new_tokens": limit, "options.top_logprobs": best, "options.prompt_logprobs": "echo"}


def _forms(body: bodies.CompletionOptions) -> Iterator[tuple[str, str, Any]]:
    """Yields the forms of the text that are no options by name: option, field and value. Raises InvalidInput."""
    form = body.response_format or bodies.ResponseFormat(type="text")
    schemas = [schema for schema in (form.json_schema, form.schema_, form.value) if schema is not None]
    if len(schemas) > 1:
        raise InvalidInput("response_format", "has several of json_schema, schema and value; give one")
    if form.type == "regex":
        if not isinstance(form.value, str):
            raise InvalidInput("response_format.value", "must be a text")
        yield "regex", "response_format.value", form.value
    elif form.type == "json" or (form.type == "json_object" and form.value):
        if form.value is None:
            raise InvalidInput("response_format.value", "must be a text or an object")
        yield "json_schema", "response_format.value", form.value
    elif form.type == "text":
        if schemas:
            raise InvalidInput("response_format.type", "is text, with which there is no schema")
    elif named := form.json_schema:
        if named.schema_ is None:
            raise InvalidInput("response_format.json_schema.schema", "is missing")
        yield "json_schema", "response_format.json_schema.schema", named.schema_
    elif form.schema_ is not None:
        yield "json_schema", "response_format.schema", form.schema_
    elif form.type == "json_schema":
        raise InvalidInput("response_format.json_schema", "is missing")
    else:
        yield "json_object", "response_format", True
    if outputs := body.structured_outputs:
        for name, value in outputs.model_dump(exclude_none=True, by_alias=True).items():
            yield _FORM_OPTIONS.get(name, name), f"structured_outputs.{name}", value


def _options(body: bodies.CompletionOptions, max_tokens: int | None, top_logprobs: int | None) -> GenerationOptions:
    named = {name: getattr(body, option.openai) for name, option in OPTIONS.items() if option.openai}
    options = {name: value for name, value in named.items() if value is not None}
    stops = options.get("stop_strings", ())
    if "" in ([stops] if isinstance(stops, str) else stops):  # OpenAI ignores empty strings
        options["stop_strings"] = [stop for stop in stops if stop]
    choices_field = OPTIONS["choices"].openai
    for name, form_field, value in _forms(body):
        if name in options:
            raise InvalidInput(form_field, "is given twice")
        options[name] = value
        choices_field = form_field if name == "choices" else choices_field
    if options.get("choices") == []:
        raise InvalidInput(choices_field, "is empty; a text must have a choice")
    if body.ignore_eos:
        if max_tokens is None:
            raise InvalidInput("ignore_eos", "needs max_tokens, which the text then has")
        options["min_new_tokens"] = max_tokens
    drawn = [name for name in DRAWING if name in options]
    texts, beams = body.n or 1, options.get("num_beams", 1)
    if options.get("temperature") == 0 and texts > 1 and beams == 1:
        raise InvalidInput("n", "must be 1 with a temperature of 0, which gives the same text each time")
    if drawn and beams > 1 and options.get("temperature") != 0:
        raise InvalidInput(drawn[0], "cannot be combined with num_beams, which draws nothing")
    options = with_drawing(options, is_drawn=texts > 1 and beams == 1)
    if "seed" in options:
        options["seed"] %= _SEEDS
    if options.get("top_k") == -1:
        options["top_k"] = 0
    return GenerationOptions(**message_fields(options), max_new_tokens=max_tokens, top_logprobs=top_logprobs)
