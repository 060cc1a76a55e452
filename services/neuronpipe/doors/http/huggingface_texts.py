"""Hugging Face's JSON of generated texts: reads transformers' parameters, and writes texts as TGI does.

A text is written whole, or token by token as events.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, GenerationOptions, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import DRAWING, OPTIONS, message_fields
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import HttpRequest, HttpResponse
from neuronpipe.doors.http.huggingface_bodies import GenerateParameters, Grammar, Prompted, Summarization, Translation
from neuronpipe.doors.http.problems import TGI_ERROR
from neuronpipe.doors.inference import Inference, ModelCall, cut_fields, truncation_of
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent
from neuronpipe.tasks.text_options import GenerationFacts, form_of

# Options of generation that have the same name in a request.
_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.huggingface)
# Our limits of new tokens → transformers' limits, which also count the token that the text follows.
_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
TEXT_FIELDS = {
    "prompt": "inputs…",
    "truncation": "parameters.truncation",
    "truncation_tokens": "parameters.truncate",
    **{f"options.{name}": f"parameters.{name}" for name in _OPTIONS},
    "options.stop_strings": "parameters.stop",
    "options.top_logprobs": "parameters.details",
}
_REASONS = {
    FinishReason.FINISH_REASON_END: "eos_token",
    FinishReason.FINISH_REASON_STOP_STRING: "stop_sequence",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


def _options(parameters: Mapping[str, Any]) -> GenerationOptions:
    """Returns the options of generation among the parameters of a request, which have the names of transformers."""
    fields = message_fields({name: value for name, value in parameters.items() if name in _OPTIONS})
    return GenerationOptions(**fields)


def read_prompt(input: str, body: Prompted, model: ModelSpec) -> TaskInput:
    """Returns the input of a text that is to be continued. Raises InvalidInput."""
    parameters = body.parameters
    fields = parameters.model_dump(exclude_none=True)
    is_drawn = _is_drawn(parameters)
    if parameters.option("do_sample") is not None or is_drawn:
        fields["do_sample"] = is_drawn
    # A model of another task is refused later, by all doors alike.
    model_draws = model.task == "text_generation" and GenerationFacts.of(model).do_sample
    is_left_to_model = parameters.option("do_sample") is None and (
        model_draws or (parameters.option("num_beams") or 1) > 1
    )
    if not (is_drawn or is_left_to_model):
        fields = {name: value for name, value in fields.items() if name not in DRAWING}
    options = _options(fields)
    if parameters.details:
        options.top_logprobs = 0
    options.stop_strings.extend([*(parameters.stop or ()), *(parameters.stop_sequences or ())])
    if parameters.grammar:
        if form := form_of(options):
            raise InvalidInput("parameters.grammar", f"cannot be combined with {form}")
        options.MergeFrom(_form(parameters.grammar))
    cuts: dict[str, Any] = {"truncation": truncation_of(parameters.truncation, None)}
    if parameters.truncate:
        cuts = cut_fields(parameters.truncate, "left")
    return TaskInput(text_generation=tasks.TextGenerationInput(prompt=input, options=options, **cuts))


def _form(grammar: Grammar) -> GenerationOptions:
    value = grammar.value
    if grammar.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema", value)
    if grammar.type == "regex" and not isinstance(value, str):
        raise InvalidInput("parameters.grammar.value", "must be a text")
    if not isinstance(value, str | dict):
        raise InvalidInput("parameters.grammar.value", "must be a text or an object")
    return GenerationOptions(**message_fields({"regex" if grammar.type == "regex" else "json_schema": value}))


def prompt_fields(body: Prompted) -> dict[str, str]:
    """Returns the paths of stop strings and of TGI's `grammar` by our names of the options, for a request with them."""
    parameters = body.parameters
    stops = [f"parameters.{name}" for name in ("stop_strings", "stop", "stop_sequences") if getattr(parameters, name)]
    names = {"options.stop_strings": " and ".join(stops)} if stops else {}
    forms = ("options.json_schema", "options.regex") if parameters.grammar else ()
    return names | dict.fromkeys(forms, "parameters.grammar.value")


def one_text_fields(body: Prompted) -> dict[str, str]:
    """Returns a request's names of fields, for a request whose `inputs` is one text."""
    return TEXT_FIELDS | prompt_fields(body)


def read_one_prompt(input: str, body: Prompted, model: ModelSpec) -> TaskInput:
    """Returns the input of a request whose answer has one text. Raises InvalidInput."""
    if (body.parameters.option("num_return_sequences") or 1) > 1:
        raise InvalidInput("parameters.num_return_sequences", "must be 1, because the answer has one text")
    return read_prompt(input, body, model)


def _is_drawn(parameters: GenerateParameters) -> bool:
    """Returns whether the parameters ask for tokens drawn at random. A seed alone does not."""
    has_limits = (parameters.option("num_beams") or 1) == 1 and any(
        parameters.option(name) is not None for name in DRAWING if name != "seed"
    )
    return has_limits if parameters.option("do_sample") is None else parameters.option("do_sample")


def _read_text(input: str, body: Summarization | Translation) -> dict[str, Any]:
    """Returns the fields of an input for a text to summarize or translate. Raises InvalidInput."""
    parameters = body.parameters
    beside = parameters.model_dump(exclude_none=True, exclude={"generate_parameters"})
    fields = parameters.generate_parameters.model_dump(exclude_none=True)
    for name in sorted(beside.keys() & fields.keys()):
        raise InvalidInput(f"parameters.{name}", "is also in generate_parameters")
    fields |= beside
    for ours, theirs in _LENGTHS.items():
        if ours in fields and theirs in fields:
            raise InvalidInput(f"{_place(theirs, body)}.{theirs}", f"cannot be combined with {ours}")
        if theirs in fields:
            fields[ours] = max(0, fields[theirs] - 1)
    return {"text": input, "options": _options(fields), "truncation": truncation_of(fields.get("truncation"), None)}


def _place(name: str, body: Summarization | Translation) -> str:
    is_within = getattr(body.parameters.generate_parameters, name) is not None
    return "parameters.generate_parameters" if is_within else "parameters"


def writing_fields(body: Summarization | Translation) -> dict[str, str]:
    """Returns a request's names of options."""
    names = {f"options.{name}": f"{_place(name, body)}.{name}" for name in _OPTIONS}
    for ours, theirs in _LENGTHS.items():
        if getattr(body.parameters, theirs) or getattr(body.parameters.generate_parameters, theirs):
            names[f"options.{ours}"] = f"{_place(theirs, body)}.{theirs} - 1"
    return names


def read_summary(input: str, body: Summarization, model: ModelSpec) -> TaskInput:
    """Returns the input of a text to summarize. Raises InvalidInput."""
    return TaskInput(summarization=tasks.SummarizationInput(**_read_text(input, body)))


def read_translation(input: str, body: Translation, model: ModelSpec) -> TaskInput:
    """Returns the input of a text to translate. Raises InvalidInput."""
    parameters = body.parameters
    fields = _read_text(input, body)
    fields |= {"source_language": parameters.src_lang or "", "target_language": parameters.tgt_lang or ""}
    return TaskInput(translation=tasks.TranslationInput(**fields))


def write_text(text: GeneratedText, prompt: str, body: Prompted) -> dict[str, Any]:
    """Returns TGI's answer for a text. With `details`, the answer also has the reason for its end, and the tokens."""
    answer: dict[str, Any] = {"generated_text": prompt + text.text if body.parameters.return_full_text else text.text}
    if body.parameters.details:
        tokens = [_token(token, token.text) for token in text.logprobs]
        if tokens:
            tokens[-1]["special"] = _is_special_end(text, text.logprobs[-1])
        answer["details"] = text_details(text, body) | {"prefill": [], "tokens": tokens}
    return answer


def text_details(text: GeneratedText, body: Prompted) -> dict[str, Any]:
    """Returns the reason for a text's end, the number of its tokens, and its seed."""
    return {
        "finish_reason": _REASONS[text.finish_reason],
        "generated_tokens": len(text.token_ids),
        "seed": body.parameters.option("seed") if _is_drawn(body.parameters) else None,
    }


async def answer_tokens(
    inference: Inference, request: HttpRequest, model: ModelSpec, body: Prompted, prompt: str
) -> HttpResponse:
    """Answers with one text as events. Raises NeuronpipeError if it fails before the first token."""
    input = read_one_prompt(prompt, body, model)
    input.text_generation.options.top_logprobs = 0  # only the log probability of the chosen token
    model_call = ModelCall(request.call, request.model(model.name), one_text_fields(body))
    events = await inference.stream(model_call, input)
    return event_response(_values(events, prompt, body), TGI_ERROR)


async def _values(
    events: AsyncGenerator[TextEvent, None], prompt: str, body: Prompted
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields a value for each token; the last value also has the whole text."""
    index, last, last_token = 0, dict[str, Any](), tasks.TokenLogprob()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, GeneratedPart):
                # Tokens that become text together: the last of them has the text.
                tokens = [_token(token, "") for token in event.logprobs]
                tokens[-1]["text"] = event.text
                values = [
                    {"index": number, "token": token, "generated_text": None, "details": None}
                    for number, token in enumerate(tokens, index + 1)
                ]
                index += len(values)
                if event.is_last:
                    last, last_token = values.pop(), event.logprobs[-1]
                for value in values:
                    yield value
            elif isinstance(event, InferenceResult):
                text = event.texts[0]
                last["token"]["special"] = _is_special_end(text, last_token)
                whole = write_text(text, prompt, body)["generated_text"]
                details = text_details(text, body) | {"input_length": event.usage.tokens}
                yield last | {"generated_text": whole, "details": details}


def _is_special_end(text: GeneratedText, last_token: tasks.TokenLogprob) -> bool:
    """Returns whether the last token ended the text, and has no text itself."""
    return text.finish_reason == FinishReason.FINISH_REASON_END and not last_token.text


def _token(token: tasks.TokenLogprob, text: str) -> dict[str, Any]:
    return {"id": token.token_id, "text": text, "logprob": token.logprob, "special": False}
