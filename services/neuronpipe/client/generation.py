"""The requests of tasks that generate text, for both clients."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import (
    ChatMessage,
    GenerationOptions,
    TaskInput,
    TextGenerationInput,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import message_fields

# Messages of a chat, or what has their fields, role and content.
Messages: TypeAlias = Iterable[ChatMessage | Mapping[str, str]]


def generation_request(
    model: str,
    prompt: str | None,
    options: Any,
    *,
    messages: Messages | None = None,
    truncation: "Truncation.ValueType",
    version: str,
    priority: "Priority.ValueType",
) -> InferRequest:
    """The request. Raises InvalidInput for a value that is of no type of its field, or beyond its type's range."""
    if (prompt is None) == (messages is None):
        raise InvalidInput("prompt", "give either a prompt or messages")
    if not isinstance(prompt, str | None):
        raise InvalidInput("prompt", f"takes one text, not a value of the type {type(prompt).__name__}")
    message = _options(options)
    text_generation = TextGenerationInput(
        prompt=prompt or "", messages=_chat(messages or ()), options=message, truncation=truncation
    )
    return InferRequest(
        model=model, version=version, input=TaskInput(text_generation=text_generation), priority=priority
    )


def text_request(
    task: str,
    model: str,
    texts: Mapping[str, str],
    options: Any,
    *,
    truncation: "Truncation.ValueType",
    version: str,
    priority: "Priority.ValueType",
) -> InferRequest:
    """The request of a task that writes a text about another: `texts` are the fields of its input. Raises InvalidInput
    as generation_request does.
    """
    for name, text in texts.items():
        if not isinstance(text, str):
            raise InvalidInput(name, f"takes one text, not a value of the type {type(text).__name__}")
    input = TaskInput()
    getattr(input, task).MergeFrom(
        type(getattr(input, task))(**texts, options=_options(options), truncation=truncation)
    )
    return InferRequest(model=model, version=version, input=input, priority=priority)


def _options(options: Any) -> GenerationOptions:
    if isinstance(options.get("stop_strings"), str):
        raise InvalidInput("options.stop_strings", "takes a list of texts, not one text")
    message = GenerationOptions()
    for name, value in options.items():
        if name not in GenerationOptions.DESCRIPTOR.fields_by_name:
            raise TypeError(f"there is no option {name!r}")
        if value is None:  # the model's own
            continue
        try:
            message.MergeFrom(GenerationOptions(**message_fields({name: value})))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"options.{name}", "takes another type of value, or a smaller number") from error
    return message


def _chat(messages: Messages) -> list[ChatMessage]:
    if isinstance(messages, str | Mapping):
        raise InvalidInput("messages", "takes a list of messages, each with a role and a content")
    try:
        return [one if isinstance(one, ChatMessage) else ChatMessage(**one) for one in messages]
    except (TypeError, ValueError) as error:
        raise InvalidInput("messages", "takes messages, each with a role and a content, both texts") from error
