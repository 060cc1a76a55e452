"""Tokenization and detokenization: the tokenizer makes the result, and the model computes nothing.

The result travels from the stage with the tokenizer to the decoding stage as an annotation.
"""

from functools import partial

import numpy as np
from google.protobuf.message import DecodeError, Message

from neuronpipe.api.v1.tasks_pb2 import (
    DetokenizationInput,
    DetokenizationResult,
    Token,
    TokenizationInput,
    TokenizationResult,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks import text_generation
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_token_ids, traits_of

# Twice the limit of the models with the longest inputs. Writing them as JSON takes an event loop about 20 ms.
_MAX_TOKENS = 1 << 14


def check_tokenization(input: TokenizationInput, model: ModelSpec) -> None:
    if not input.HasField("chat"):
        check_text("text", input.text)
        return
    if input.text:
        raise InvalidInput("chat", "cannot be combined with a text")
    if text_generation.TASK.name not in model.tasks:
        raise InvalidInput("chat", f"model {model.name!r} takes none; send a text")
    if not input.chat.messages:
        raise InvalidInput("messages", "is empty")
    text_generation.check(input.chat, model)


def encode_tokenization(input: TokenizationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Splits the text into tokens, each with its part of the text, or counts the tokens of the chat.

    Raises InvalidInput if a text has too many tokens.
    """
    if input.HasField("chat"):
        encoded = text_generation.encode_messages(input.chat, tokenizer)
        return _answered(TokenizationResult(chat_tokens=len(encoded.token_ids)))
    text = input.text
    pieces = tokenizer.tokens(text, special_tokens=not input.skip_special_tokens, max_tokens=_MAX_TOKENS)
    places = zip(
        pieces.token_ids.tolist(), pieces.names, pieces.char_start.tolist(), pieces.char_end.tolist(), strict=True
    )
    tokens = [
        Token(token_id=token_id, text=name, is_special=True)
        if start < 0
        else Token(token_id=token_id, text=text[start:end], start=start, end=end)
        for token_id, name, start, end in places
    ]
    return _answered(TokenizationResult(tokens=tokens))


def check_detokenization(input: DetokenizationInput, model: ModelSpec) -> None:
    if len(input.token_ids) > _MAX_TOKENS:
        raise InvalidInput("token_ids", f"{len(input.token_ids)} ids, the limit of detokenization is {_MAX_TOKENS}")
    check_token_ids(input.token_ids, model)


def encode_detokenization(input: DetokenizationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Converts the tokens to text."""
    text = tokenizer.text_of(input.token_ids, special_tokens=not input.skip_special_tokens)
    return _answered(DetokenizationResult(text=text))


def _answered(result: Message) -> Encoded:
    return Encoded([], [{"result": np.frombuffer(result.SerializeToString(), np.uint8)}])


def _decode(
    kind: type[Message], input: Message, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> Message:
    try:
        return kind.FromString(annotations[0]["result"].tobytes())
    except (LookupError, DecodeError) as error:
        raise InvalidInput("annotations", f"hold no {kind.DESCRIPTOR.full_name}") from error


def _tokenization_traits(input: TokenizationInput) -> tuple[str | int, ...]:
    return *_text_traits(input), *(text_generation.traits(input.chat) if input.HasField("chat") else ())


_text_traits, _ids_traits = traits_of("text", "skip_special_tokens"), traits_of("token_ids", "skip_special_tokens")
_tokens, _text = partial(_decode, TokenizationResult), partial(_decode, DetokenizationResult)
TOKENIZATION = Task(
    "tokenization",
    check_tokenization,
    _tokenization_traits,
    encode_tokenization,
    _tokens,
    (),
    reads_date=lambda task_input: text_generation.TASK.reads_date(task_input.chat),
)
DETOKENIZATION = Task("detokenization", check_detokenization, _ids_traits, encode_detokenization, _text, ())
