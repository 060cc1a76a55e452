"""Reads and checks bodies in JSON, and writes them.

pydantic, which the settings need anyway, checks a body of one text in 1 µs and of 32 texts in 1.5 µs
(docs/decisions/0020). orjson reads and writes: it refuses NaN and bytes that are not UTF-8, and writes arrays of NumPy.
"""

import binascii
import re
import sys
from base64 import b64decode
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import orjson
from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import Option, OptionKind
from neuronpipe.core.parsing import MAX_OBJECT_BYTES, TOO_MANY_VALUES, check_depth, takes_too_much, too_long
from neuronpipe.platform.process.lanes import is_on_event_loop

# Numbers of an array that are written at once, in about a millisecond.
_PIECE = 1 << 14
# Values of a list that are made at once.
_VALUES = 1024
# Maximum number of characters of an error's path, which may contain the caller's own words.
_MAX_PATH = 200
_UNKNOWN = "unknown_field"
# The error of a value that lacks a field, which other fields make necessary. Its context has the `field`.
MISSING = "missing_field"
# pydantic's errors of a value whose field `type` says which of several kinds it has.
_UNKNOWN_KIND, _NO_KIND = "union_tag_invalid", "union_tag_not_found"
# Fields of bodies, at any depth, that change no answer: marks for bills and logs, hints for caches and schedulers.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "prediction", "safety_identifier"),  # OpenAI
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        *("client_metadata", "session_id", "keep_alive", "ttl", "provider"),  # clients of OpenAI, Ollama, OpenRouter
        *("priority", "request_id", "rid", "cache_salt", "guided_decoding_backend"),  # vLLM, SGLang
        "spaces_between_special_tokens",  # fast tokenizers put no spaces there
        *("cache_prompt", "padding"),  # llama.cpp, transformers
    )
)


# Maximum number of names in the header of ignored fields, and of characters of a name.
_MAX_IGNORED, _MAX_IGNORED_CHARS = 32, 64
_STRICTNESS = {"": None, "true": True, "false": False}


class UnknownFields(NamedTuple):
    """The rule for unknown fields of a request's body, and the names of the fields that were ignored.

    `is_strict`: True: all are refused; False: all are ignored; None: harmless fields are ignored, others are refused.
    """

    is_strict: bool | None
    ignored: dict[str, None]

    @classmethod
    def enter(cls, strict: str = "") -> None:
        """Sets the rule of the running task by the request's word for `is_strict`. Raises InvalidInput."""
        if strict not in _STRICTNESS:
            raise InvalidInput(STRICT_FIELD, "must be true or false")
        _UNKNOWN_FIELDS.set(cls(_STRICTNESS[strict], {}))

    @classmethod
    def header(cls) -> bytes:
        """Returns the names of the ignored fields, percent-encoded, with commas between; empty if none was ignored."""
        names = [quote(name[:_MAX_IGNORED_CHARS], safe="[]") for name in cls.current().ignored]
        if len(names) > _MAX_IGNORED:
            names[_MAX_IGNORED:] = ["..."]
        return ", ".join(names).encode()

    @classmethod
    def current(cls) -> "UnknownFields":
        """Returns the rule of the running task."""
        return _UNKNOWN_FIELDS.get(None) or cls(None, {})

    def ignore(self, name: str, *, is_harmless: bool) -> bool:
        """Tells whether the body may ignore a field, whose name the header then has."""
        if self.is_strict or not (is_harmless or self.is_strict is False):
            return False
        if len(self.ignored) <= _MAX_IGNORED:
            self.ignored[name] = None
        return True


def ignore(field: str, problem: str = "is not supported") -> None:
    """Adds a known field without effect to the header of ignored fields. Raises InvalidInput in a strict request."""
    if not UnknownFields.current().ignore(field, is_harmless=True):
        raise InvalidInput(field, problem)


STRICT_FIELD = "neuronpipe-strict"
_UNKNOWN_FIELDS: ContextVar[UnknownFields] = ContextVar("neuronpipe_unknown_fields")


class Body(BaseModel):
    """The base of all bodies of requests, and of their parts.

    A field that the body does not have is refused by its name, unless it is among `harmless`: to ignore it would
    mislead the caller. The request may ask for another rule. A field that is null counts as missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = HARMLESS

    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        field_names: set[str] = set()
        for name, field in cls.model_fields.items():
            alias = field.validation_alias
            field_names.update(map(str, alias.choices if isinstance(alias, AliasChoices) else [alias or name]))
        cls._known = frozenset(field_names)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        value = without_nulls(value)
        extra = cls.model_config["extra"]
        if not isinstance(value, dict) or value.keys() <= cls._known or extra == "allow":
            return value
        known_fields = {name: inner for name, inner in value.items() if name in cls._known}
        unknown_fields = UnknownFields.current()
        for name in value:
            if name in known_fields:
                continue
            # The first unknown field is the only error: the errors of all unknown fields could take gigabytes.
            if not unknown_fields.ignore(name, is_harmless=extra == "ignore" or name in cls.harmless):
                raise PydanticCustomError(_UNKNOWN, "is not supported", {"field": name})
        return known_fields


class ModelBody(Body):
    """A body that may name its model."""

    model: str | None = None


def without_nulls(value: Any) -> Any:
    """Returns an object in JSON without the fields that are null, as clients write fields that they do not set."""
    if isinstance(value, dict) and None in value.values():
        return {name: inner for name, inner in value.items() if inner is not None}
    return value


def only(*values: Any, advice: str = "") -> AfterValidator:
    """Returns the check of a field that is not supported, but that clients send with values that change nothing.

    `advice`: the end of the error.
    """

    def refuse(value: Any) -> None:
        if value is not None and without_nulls(value) not in values:
            raise ValueError(f"is not supported; {advice}" if advice else "is not supported")

    return AfterValidator(refuse)


def fixed(**values: Any) -> dict[str, tuple[Any, Any]]:
    """Returns fields that are not supported, each with the value of clients that changes nothing; see `with_fields`."""
    return {name: (Annotated[Any, only(value)], None) for name, value in values.items()}


ElementT = TypeVar("ElementT")
# A list whose first wrong item is its only error: the errors of 64 MiB of wrong items would take gigabytes.
Many = Annotated[list[ElementT], Field(fail_fast=True)]
# Accepts 5.0 as 5, because some languages write each number with a fraction. In an annotation it follows the bounds,
# which schemas would lose otherwise.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, Field(ge=1, lt=1 << 32), WHOLE]


def _check_kept(tokens: int) -> int:
    if tokens == -1 or 1 <= tokens < 1 << 32:
        return tokens
    raise ValueError("must be 1 or more, or -1 for as many as the model takes")


# vLLM's truncate_prompt_tokens. -1 keeps as many tokens as the model takes.
KeptTokens = Annotated[int, Field(json_schema_extra={"minimum": -1}), AfterValidator(_check_kept), WHOLE]
Whole = Annotated[int, Field(ge=0, lt=1 << 32), WHOLE]
# The token ids of a text: more than any model takes, and few enough to be converted on the event loop in about 10 ms.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(fail_fast=True, min_length=1, max_length=1 << 16)
]
TextsOrTokens = Annotated[
    str | Many[str] | TokenIds | Many[TokenIds],
    Field(description="a text, or several; or instead of each text its ids of the model's own tokenizer"),
]


class Address(Body):
    harmless = HARMLESS | {"detail"}

    url: str


class Part(Body):
    """A text or an image in Base64: `text` or `image` of Jina, or a part of OpenAI's, vLLM's and Cohere's contents."""

    type: Literal["text", "image_url", "input_text", "input_image"] | None = None
    text: str | None = None
    image: str | None = None
    image_url: str | Address | None = None

    @property
    def value(self) -> str | bytes:
        """The text, or the bytes of the image. Raises InvalidInput."""
        if len({"text", "image", "image_url"} & self.model_fields_set) != 1:
            raise InvalidInput("text", "a part must have one of text, image and image_url")
        if self.text is not None:
            return self.text
        image = self.image_url or self.image or ""
        return read_image(image.url if isinstance(image, Address) else image)


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
    """Returns the field of an option of generation: its type and its default. Tasks check the bounds of its value."""
    minimum, maximum = int(max(option.minimum, 0)), (1 << (64 if option.maximum > 1 << 32 else 32)) - 1
    form = Annotated[int, Field(ge=minimum, le=maximum), WHOLE] if option.kind == "int" else _FORMS[option.kind]
    return form | None, Field(None, description=option.text)


# OpenAI's developer is the system in templates, of which some leave out a role that they do not know.
Role = Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
Direction = Literal["Right", "Left", "right", "left"]


def either(first: type[Body], second: type[Body], marks: Set[str], description: str) -> Any:
    """Returns the type of a body that is `second` if it has any of the fields in `marks`, and else `first`."""

    def tag(body: Any) -> str:
        is_second = not marks.isdisjoint(body) if isinstance(body, dict) else isinstance(body, second)
        return "second" if is_second else "first"

    union = Annotated[first, Tag("first")] | Annotated[second, Tag("second")]  # type: ignore[valid-type]
    return Annotated[union, Discriminator(tag), Field(description=description)]


# A mark in the bytes of JSON → memory of the value that is made for it. A number or text takes up to 64 bytes, a list
# or a name in an object a few hundred, and an object a thousand once it is checked.
_JSON_BYTES = {b",": 64, b":": 256, b"[": 512, b"{": 1024}
LINE_BYTES = {b",": 64, b"\n": 64}
_LIST = re.compile(rb'"(\w{1,64})"\s*:\s*\[', re.ASCII)
# An object has two bytes, and a comma behind it.
_COUNTED_FROM_BYTES = 3 * MAX_OBJECT_BYTES // max(_JSON_BYTES.values())


def check_values(data: bytes, bytes_by_mark: Mapping[bytes, int] = _JSON_BYTES) -> None:
    """Raises InvalidInput if the text's values would take too much memory. Marks in strings do not count."""
    if len(data) <= _COUNTED_FROM_BYTES:
        return
    if takes_too_much(data, bytes_by_mark):
        raise InvalidInput(_longest_list(data), f"{TOO_MANY_VALUES}; send fewer at once")


def _longest_list(data: bytes) -> str:
    """Returns the name of the longest list in a body in JSON, judged by the beginning of the body."""
    lists = [*islice(_LIST.finditer(data[: 1 << 20]), 16)]
    ends = [match.start() for match in lists[1:]] + [len(data)]
    longest, name = 0, "body"
    for match, end in zip(lists, ends, strict=False):
        if end - match.end() > longest:
            longest, name = end - match.end(), match[1].decode()
    return name


def embedding_task(inputs: Sequence[Any]) -> str:
    """Returns the task of a model that makes vectors of these inputs: images alone, or also texts."""
    is_image = inputs and all(isinstance(part, Part) and part.text is None for part in inputs)
    return "image_embedding" if is_image else "sentence_embedding"


def texts_of(texts: str | list[str]) -> list[str]:
    """Returns a text, or several, as a list."""
    return [texts] if isinstance(texts, str) else texts


# orjson's words for a number that is JSON, and that no float64 holds.
_TOO_LARGE = "number is infinity when parsed as double"


def read_json(data: bytes, max_text_bytes: int = sys.maxsize) -> Any:
    """Returns a value in JSON, which may follow a byte order mark. Raises InvalidInput."""
    check_values(data)
    check_depth("body", data)
    try:
        value = orjson.loads(data.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        is_number = error.msg == _TOO_LARGE
        problem = "a number is too large, the limit is 1.8e308" if is_number else "is no valid JSON in UTF-8"
        raise InvalidInput("body", f"{problem}: line {error.lineno}, column {error.colno}") from None
    if len(data) > max_text_bytes:
        _check_texts(value, max_text_bytes)
    return value


# The fields of images in Base64, which may be longer than texts.
_IMAGES = frozenset({"image", "images", "image_url", "url"})


def _check_texts(value: Any, max_bytes: int) -> None:
    """Raises InvalidInput if a text that is no image has more characters than an input may have bytes."""
    # Lists and objects, each with the index of its container in this list, and its name in the container.
    containers: list[tuple[Any, int, int | str]] = [([value], 0, "")]
    for index, (container, _, field) in enumerate(containers):
        for name, inner in container.items() if type(container) is dict else enumerate(container):
            kind = type(inner)
            if kind is str:
                if len(inner) > max_bytes and _IMAGES.isdisjoint((field, name)):
                    path = [name]
                    while index:
                        _, index, name = containers[index]
                        path.append(name)
                    raise too_long(_path(value, (*path[-2::-1],), is_missing=False), max_bytes)
            elif kind is list or kind is dict:
                containers.append((inner, index, name))


def read_body(kind: TypeAdapter[Any], data: bytes, max_text_bytes: int = sys.maxsize) -> Any:
    """Returns the value of a body in JSON. `max_text_bytes`: limit of each text in the body.

    Raises InvalidInput, which names the path of the field at fault.
    """
    return check_body(kind, read_json(data, max_text_bytes))


def check_body(kind: TypeAdapter[Any], value: Any) -> Any:
    """Checks the value of a body, as `read_body` does."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        # A value with several forms has the errors of each form. The caller meant the form whose error is deepest in
        # the value, or the form that is right except for its length.
        worst = max(
            error.errors(include_url=False, include_input=False),
            key=lambda error: (
                error["type"] in ("too_long", "too_short"),
                len(_place(error)),
                [step for step in error["loc"] if isinstance(step, int)],
            ),
        )
        raise InvalidInput(
            _path(value, _place(worst), worst["type"] in ("missing", MISSING, _NO_KIND)), _problem(worst)
        ) from None


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    if error["type"] in (_UNKNOWN_KIND, _NO_KIND):
        return (*error["loc"], error["ctx"]["discriminator"].strip("'"))
    return (*error["loc"], error["ctx"]["field"]) if error["type"] in (_UNKNOWN, MISSING) else error["loc"]


def read_base64(text: str) -> bytes:
    """Returns the bytes of Base64, which may have lines, the alphabet for URLs, no padding, or the form of a data: URL.

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


def read_image(text: str) -> bytes:
    """Returns the bytes of an image in Base64. Raises InvalidInput for the field `image`."""
    if text.startswith(("http://", "https://")):
        raise InvalidInput("image", "is an address; send the image itself, in Base64")
    try:
        return read_base64(text)
    except ValueError as error:
        raise InvalidInput("image", str(error)) from None


def write_body(value: Any) -> bytes:
    """Returns JSON. A thread writes arrays of NumPy in pieces, so that other threads run between two pieces."""
    if is_on_event_loop():
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return orjson.dumps(value, default=_write_array)


def write_list(values: Iterable[Any]) -> orjson.Fragment:
    """Writes a list of many small values as a part of a body, without all values in memory at once."""
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
    return orjson.Fragment(b"[" + b",".join(piece[1:-1] for piece in pieces) + b"]")


def _path(value: Any, location: tuple[int | str, ...], is_missing: bool) -> str:
    """Returns the path of a field in the value, such as `input[3].text`.

    pydantic's location also has steps that name forms of a value, which the path leaves out.
    """
    steps = _fields_of(value, location, is_missing)
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")[:_MAX_PATH] or "body"


def _fields_of(value: Any, location: tuple[int | str, ...], is_missing: bool) -> list[int | str]:
    """Returns the steps of a location that are indices and fields of the value, as many as possible.

    A form may have the name of a field: then the last step, the field at fault, counts more than a step before it.
    """
    if not location:
        return []
    step, rest = location[0], location[1:]
    is_step = isinstance(step, int) if isinstance(value, list) else isinstance(value, dict) and step in value
    if not is_step:
        return [step] if is_missing and not rest else _fields_of(value, rest, is_missing)
    steps = [step, *_fields_of(value[step], rest, is_missing)]
    if isinstance(step, int) or len(steps) == len(location):
        return steps
    others = _fields_of(value, rest, is_missing)
    return max(steps, others, key=lambda found: (len(found), found[-1:] == [location[-1]]))


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":  # a second name of a field
        return "is not supported"
    if error["type"] in ("model_type", "dict_type"):  # pydantic's message names a class
        return "must be an object"
    if error["type"] == _UNKNOWN_KIND:  # pydantic's message repeats the caller's word
        return f"must be one of {error['ctx']['expected_tags']}"
    if error["type"] == _NO_KIND:
        return "field required"
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
