"""JSON bodies: read and checked on their way in, written on their way out.

pydantic checks, which the settings need anyway, in 1 µs for one text and 1.5 µs for 32 (docs/decisions/0020). orjson
reads and writes: it refuses NaN and what is not UTF-8, and writes arrays of NumPy.
"""

import binascii
import re
import sys
from base64 import b64decode
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import orjson
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import Option, OptionKind
from neuronpipe.core.parsing import MAX_OBJECT_BYTES, PIECE_BYTES, check_depth, outside_of_strings, too_long
from neuronpipe.platform.process.lanes import is_on_event_loop

# Numbers of an array that are written at once, in about a millisecond.
_PIECE = 1 << 14
# Values of a list that are made at once.
_VALUES = 1024
# Of one error's path: what stands in it of the caller's own words has an end.
_MAX_PATH = 200


_UNKNOWN = "unknown_field"
# Fields of bodies, at any depth, that change no answer: marks for bills and logs, hints for caches and schedulers.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "prediction", "safety_identifier"),  # OpenAI's
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        *("client_metadata", "session_id", "keep_alive", "ttl", "provider"),  # of its clients, Ollama's, OpenRouter's
        *("priority", "request_id", "rid", "cache_salt", "guided_decoding_backend"),  # vLLM's, SGLang's
        "spaces_between_special_tokens",  # fast tokenizers put none there
        *("cache_prompt", "padding"),  # llama.cpp's, transformers'
    )
)


class Body(BaseModel):
    """The base of all bodies of requests, and of their parts.

    A field that the body does not have is refused by its name, as to ignore it would mislead its caller, unless it is
    among `harmless`. A field that is null is one that is not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = HARMLESS

    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls._known = frozenset(one for name, field in cls.model_fields.items() for one in _names(name, field))

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        value = without_nulls(value)
        if not isinstance(value, dict) or value.keys() <= cls._known or cls.model_config["extra"] != "forbid":
            return value
        known = {name: one for name, one in value.items() if name in cls._known}
        # One error, as those of all unknown fields could take gigabytes.
        if (
            unknown := next((name for name in value if name not in known and name not in cls.harmless), None)
        ) is not None:
            raise PydanticCustomError(_UNKNOWN, "is not supported", {"field": unknown})
        return known


class Answer(Body):
    """The base of what doors answer, as /openapi.json describes it: there may be more fields."""

    model_config = ConfigDict(extra="ignore")


def _names(name: str, field: FieldInfo) -> Iterable[str]:
    """What a body may call a field."""
    alias = field.validation_alias
    return map(str, alias.choices) if isinstance(alias, AliasChoices) else (str(alias or name),)


def without_nulls(value: Any) -> Any:
    """An object in JSON without its fields that are null: clients write those that they do not set."""
    if isinstance(value, dict) and None in value.values():
        return {name: one for name, one in value.items() if one is not None}
    return value


def only(*values: Any, advice: str = "") -> AfterValidator:
    """For a field that we do not have, of which clients send the values that change nothing. `advice`: what to do."""

    def refuse(value: Any) -> None:
        if value is not None and without_nulls(value) not in values:
            raise ValueError(f"is not supported; {advice}" if advice else "is not supported")

    return AfterValidator(refuse)


ItemT = TypeVar("ItemT")
# A list whose first wrong item is its only error: of 64 MiB of wrong items the errors would take gigabytes.
Many = Annotated[list[ItemT], Field(fail_fast=True)]
# Some languages write each number with a fraction: 5.0. It stands behind the bounds, which schemas would lose else.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, Field(ge=1, lt=1 << 32), WHOLE]


def _check_kept(tokens: int) -> int:
    if tokens == -1 or 1 <= tokens < 1 << 32:
        return tokens
    raise ValueError("must be 1 or more, or -1 for as many as the model takes")


# vLLM's truncate_prompt_tokens. -1: to what the model takes.
KeptTokens = Annotated[int, Field(json_schema_extra={"minimum": -1}), AfterValidator(_check_kept), WHOLE]
Whole = Annotated[int, Field(ge=0, lt=1 << 32), WHOLE]
# Of one text: more than any model takes, and few enough to be converted on the event loop, in about 10 ms.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(fail_fast=True, max_length=1 << 16)]
_FORMS: Mapping[OptionKind, Any] = {
    "float": float,
    "bool": bool,
    "words": bool | Literal["never"],
    "token": Whole,
    "text": str,
    "json": str | dict[str, Any],
    "texts": str | Many[str],
    "tokens": Many[Whole],
    "sequences": Many[TokenIds],
    "biases": Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float], Field(max_length=1 << 16)],
}


def option_field(option: Option) -> tuple[Any, Any]:
    """The field of an option of generation: its type, where it is given, and its default. Tasks check its bounds."""
    least, most = int(max(option.least, 0)), (1 << (64 if option.most > 1 << 32 else 32)) - 1
    form = Annotated[int, Field(ge=least, le=most), WHOLE] if option.kind == "int" else _FORMS[option.kind]
    return form | None, Field(None, description=option.text)


# What OpenAI calls its developer, templates know as the system: some leave out a role that they do not know.
Role = Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
Direction = Literal["Right", "Left", "right", "left"]

# What is made of a body's values, and by which bytes they are counted: a value takes up to 64 bytes, a list or a name
# with its place in an object a few hundred, and an object a thousand once it is checked.
_JSON_BYTES = {b",": 64, b":": 256, b"[": 512, b"{": 1024}
LINE_BYTES = {b",": 64, b"\n": 64}
_LIST = re.compile(rb'"(\w{1,64})"\s*:\s*\[', re.ASCII)
# An object has two bytes, and a comma behind it.
_COUNTED_FROM_BYTES = 3 * MAX_OBJECT_BYTES // max(_JSON_BYTES.values())


def check_values(data: bytes, bytes_by_mark: Mapping[bytes, int] = _JSON_BYTES) -> None:
    """Raises InvalidInput for a text whose values would take too much memory. Marks in strings do not count."""
    if len(data) <= _COUNTED_FROM_BYTES:
        return
    pieces = (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
    if _is_within(pieces, bytes_by_mark) or _is_within(outside_of_strings(data), bytes_by_mark):
        return
    raise InvalidInput(
        _longest_list(data),
        f"holds too many values: they would take more than {MAX_OBJECT_BYTES >> 20} MiB, the limit; send fewer at once",
    )


def _is_within(pieces: Iterable[bytes], bytes_by_mark: Mapping[bytes, int]) -> bool:
    size_bytes = 0
    for piece in pieces:
        size_bytes += sum(piece.count(mark) * made_bytes for mark, made_bytes in bytes_by_mark.items())
        if size_bytes > MAX_OBJECT_BYTES:
            return False
    return True


def _longest_list(data: bytes) -> str:
    """The name of the list that takes most of a body in JSON, as far as its beginning tells."""
    found = [*islice(_LIST.finditer(data[: 1 << 20]), 16)]
    ends = [one.start() for one in found[1:]] + [len(data)]
    longest, name = 0, "body"
    for one, end in zip(found, ends, strict=False):
        if end - one.end() > longest:
            longest, name = end - one.end(), one[1].decode()
    return name


def texts_of(given: str | list[str]) -> list[str]:
    """A text, or several, as a list."""
    return [given] if isinstance(given, str) else given


def read_json(data: bytes, max_text_bytes: int = sys.maxsize) -> Any:
    """A value in JSON, behind a byte order mark or without. Raises InvalidInput."""
    check_values(data)
    check_depth("body", data)
    try:
        value = orjson.loads(data.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise InvalidInput("body", f"is no valid JSON in UTF-8: line {error.lineno}, column {error.colno}") from None
    if len(data) > max_text_bytes:
        _check_texts(value, max_text_bytes)
    return value


def _check_texts(value: Any, max_bytes: int) -> None:
    """Raises InvalidInput for a text with more characters than an input may have bytes, before it is copied."""
    # Lists and objects, each with the place here of the one that it is in, and its name there.
    found: list[tuple[Any, int, int | str]] = [([value], 0, "")]
    for place, (one, _, _) in enumerate(found):
        for name, inner in one.items() if type(one) is dict else enumerate(one):
            kind = type(inner)
            if kind is str:
                if len(inner) > max_bytes:
                    path = [name]
                    while place:
                        _, place, name = found[place]
                        path.append(name)
                    raise too_long(_path(value, (*path[-2::-1],), is_missing=False), max_bytes)
            elif kind is list or kind is dict:
                found.append((inner, place, name))


def read_body(kind: TypeAdapter[Any], data: bytes, max_text_bytes: int = sys.maxsize) -> Any:
    """The value of a body in JSON. Raises InvalidInput naming the path of the field at fault. `max_text_bytes`: of each
    text in it.
    """
    return check_body(kind, read_json(data, max_text_bytes))


def check_body(kind: TypeAdapter[Any], value: Any) -> Any:
    """The same of a body that is read already."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        # Of a value that may have several forms, each one's errors are listed: the one that came furthest is the one
        # that was meant, or the one that is right but for its length.
        worst = max(
            error.errors(include_url=False, include_input=False),
            key=lambda one: (
                one["type"] in ("too_long", "too_short"),
                len(_place(one)),
                [step for step in one["loc"] if isinstance(step, int)],
            ),
        )
        raise InvalidInput(_path(value, _place(worst), worst["type"] == "missing"), _problem(worst)) from None


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    return (*error["loc"], error["ctx"]["field"]) if error["type"] == _UNKNOWN else error["loc"]


def read_base64(text: str) -> bytes:
    """The bytes of Base64 as clients write it: in lines, of the alphabet for URLs, without padding, or as a data: URL.

    Raises ValueError.
    """
    if text[:5].lower() == "data:":
        head, _, text = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise ValueError("is a data: URL that is not in Base64")
    text = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("is no Base64") from None


def write_body(value: Any) -> bytes:
    """JSON. In a thread, arrays of NumPy are written in pieces, so that other threads run between two of them."""
    if is_on_event_loop():
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(value, default=_write_array)


def write_list(values: Iterable[Any]) -> orjson.Fragment:
    """A list of many small values as a part of a body, without all of them in memory at once."""
    rest = iter(values)
    pieces = []
    while some := [*islice(rest, _VALUES)]:
        pieces.append(write_body(some)[1:-1])
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def _write_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.size <= _PIECE:
        return orjson.Fragment(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    if value.ndim > 1:
        return list(value)
    pieces = [write_body(value[at : at + _PIECE]) for at in range(0, value.size, _PIECE)]
    return orjson.Fragment(b"[" + b",".join(one[1:-1] for one in pieces) + b"]")


def _path(value: Any, location: tuple[int | str, ...], is_missing: bool) -> str:
    """The path as `input[3].text`.

    It is made of the steps of pydantic's location that lead through the value; the others name forms that it may have.
    """
    path = ""
    for depth, step in enumerate(location):
        is_step = isinstance(step, int) if isinstance(value, list) else isinstance(value, dict) and step in value
        if is_step:
            value = value[step]
        elif not (is_missing and depth == len(location) - 1):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")[:_MAX_PATH] or "body"


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":  # a second name of a field
        return "is not supported"
    if error["type"] in ("model_type", "dict_type"):  # whose message tells of a class
        return "must be an object"
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
