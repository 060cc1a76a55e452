"""A generated text token by token, as TGI writes it: Hugging Face's form of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.events import event_response
from neuronpipe.doors.http.exchange import HttpRequest, HttpResponse
from neuronpipe.doors.http.huggingface_texts import (
    TEXT_FIELDS,
    Prompted,
    read_one_prompt,
    text_details,
    write_text,
)
from neuronpipe.doors.http.problems import TGI_ERROR
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.text_stream import Event
from neuronpipe.gateway.inference import GeneratedPart, InferenceResult

_FIELDS = {ours: theirs.replace("…", "") for ours, theirs in TEXT_FIELDS.items()}


async def answer_tokens(
    inference: Inference, request: HttpRequest, model: ModelSpec, body: Prompted, prompt: str
) -> HttpResponse:
    """One text as events. Raises NeuronpipeError for what is wrong before its first token."""
    input = read_one_prompt(prompt, body, model)
    input.text_generation.options.top_logprobs = 0  # of each token its own
    events = await inference.stream(request.call, request.model(model.name), input, _FIELDS)
    return event_response(_values(events, prompt, body), TGI_ERROR)


async def _values(
    events: AsyncGenerator[Event, None], prompt: str, body: Prompted
) -> AsyncGenerator[dict[str, Any], None]:
    """A value for each token; the last one has the whole text, too. Of tokens that become text together, one has it."""
    index, last = 0, dict[str, Any]()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, GeneratedPart):
                values = [_value(number, token) for number, token in enumerate(_tokens(event), index + 1)]
                index += len(values)
                if event.is_last:
                    last = values.pop()
                for value in values:
                    yield value
            elif isinstance(event, InferenceResult):
                text = event.result.message.text_generation.sequences[0]
                is_end = text.finish_reason == FinishReason.FINISH_REASON_END
                last["token"]["special"] = is_end and not last["token"]["text"]
                whole = write_text(text, prompt, body)["generated_text"]
                details = text_details(text, body) | {"input_length": event.usage.tokens}
                yield last | {"generated_text": whole, "details": details}


def _tokens(part: GeneratedPart) -> list[dict[str, Any]]:
    """The tokens of a part."""
    tokens = [{"id": one.token_id, "text": "", "logprob": one.logprob, "special": False} for one in part.logprobs]
    tokens[-1]["text"] = part.text
    return tokens


def _value(index: int, token: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "token": token, "generated_text": None, "details": None}
