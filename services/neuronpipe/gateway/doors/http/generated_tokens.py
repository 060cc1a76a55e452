"""A generated text token by token, as TGI writes it: Hugging Face's form of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.doors.http.events import event_response
from neuronpipe.gateway.doors.http.exchange import HttpRequest, HttpResponse
from neuronpipe.gateway.doors.http.huggingface_tasks import (
    TEXT_FIELDS,
    Prompted,
    read_one_prompt,
    text_details,
    write_text,
)
from neuronpipe.gateway.doors.http.problems import TGI_ERROR
from neuronpipe.gateway.doors.inference import Inference
from neuronpipe.gateway.doors.text_stream import Event
from neuronpipe.gateway.inference import GeneratedPart, InferenceResult

_FIELDS = {ours: theirs.replace("…", "") for ours, theirs in TEXT_FIELDS.items()}


async def answer_tokens(
    inference: Inference, request: HttpRequest, model: ModelSpec, body: Prompted, prompt: str
) -> HttpResponse:
    """One text as events. Raises NeuronpipeError for what is wrong before its first token."""
    input = read_one_prompt(prompt, body, model)
    events = await inference.stream(request.call, request.model(model.name), input, _FIELDS)
    return event_response(_values(events, prompt, body), TGI_ERROR)


async def _values(
    events: AsyncGenerator[Event, None], prompt: str, body: Prompted
) -> AsyncGenerator[dict[str, Any], None]:
    """A value for each token, and a last one for the whole text, which repeats the last token without its text.

    Of tokens that become text together, the last one has it.
    """
    index, last = 0, 0
    async with aclosing(events):
        async for event in events:
            if isinstance(event, GeneratedPart):
                given: list[float | None] = [one.logprob for one in event.logprobs]
                logprobs = given or [None] * len(event.token_ids)
                for place, (token_id, logprob) in enumerate(zip(event.token_ids, logprobs, strict=True), 1):
                    index, last = index + 1, token_id
                    yield _value(index, token_id, event.text if place == len(event.token_ids) else "", logprob)
            elif isinstance(event, InferenceResult):
                text = event.result.message.text_generation.sequences[0]
                whole = write_text(text, prompt, body)["generated_text"]
                details = text_details(text, body) | {"input_length": event.usage.tokens}
                yield _value(index, last, "", is_special=True) | {"generated_text": whole, "details": details}


def _value(
    index: int, token_id: int, text: str, logprob: float | None = None, *, is_special: bool = False
) -> dict[str, Any]:
    token = {"id": token_id, "text": text, "logprob": logprob, "special": is_special}
    return {"index": index, "token": token, "generated_text": None, "details": None}
