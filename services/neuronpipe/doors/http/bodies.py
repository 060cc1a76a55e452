"""Reads and checks bodies in JSON, and writes them.

pydantic, which the settings need anyway, checks a body of one text in 1 µs and of 32 texts in 1.5 µs
(docs/decisions/0020). orjson reads and writes: it refuses NaN and bytes that are not UTF-8, and writes arrays of NumPy.
"""

import binascii
import sys
from base64 import b64decode
from codecs import BOM_UTF8
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.parsing import check_depth, too_many_bytes
from neuronpipe.doors.http.json_limits import check_values
from neuronpipe.platform.process.lanes import is_on_event_loop

# Numbers of an array that are written at once, in about a millisecond.
_PIECE = 1 << 14
# Values of a list that are made at once.
_VALUES = 1024
# Maximum number of characters of an error's path, which may contain the caller's own words.
_MAX_PATH = 200
# The error of an unknown field, and of a lacking field, which other fields make necessary. The context has the `field`.
UNKNOWN, MISSING = "unknown_field", "missing_field"
# pydantic's errors of a value whose field `type` says which of several kinds it has.
_UNKNOWN_KIND, _NO_KIND = "union_tag_invalid", "union_tag_not_found"
# The words for pydantic's errors of a value of another type, of which a field may permit several.
_FORMS = {
    **dict.fromkeys(("model_type", "dict_type"), "an object"),
    "list_type": "a list",
    "string_type": "a text",
    "bool_type": "true or false",
    "float_type": "a number",
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
}
# The words for other errors, with the values of pydantic's context.
_PROBLEMS = {
    "extra_forbidden": "is not supported",  # a second name of a field
    **dict.fromkeys(("missing", MISSING, _NO_KIND), "is missing"),
    _UNKNOWN_KIND: "must be one of {expected_tags}",
    "literal_error": "must be {expected}",
    "too_short": "has {actual_length} elements, the minimum is {min_length}",
    "too_long": "has more than {max_length} elements, the limit",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}
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
                    raise too_many_bytes(_path(value, (*path[-2::-1],), is_missing=False), max_bytes)
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
        errors = error.errors(include_url=False, include_input=False)
        worst = max(
            errors,
            key=lambda error: (
                error["type"] in ("too_long", "too_short"),
                len(_place(error)),
                [step for step in error["loc"] if isinstance(step, int)],
            ),
        )
        path = _path_of(value, worst)
        if worst["type"] not in _FORMS:
            raise InvalidInput(path, _problem(worst)) from None
        forms = [_FORMS[each["type"]] for each in errors if each["type"] in _FORMS and _path_of(value, each) == path]
        raise InvalidInput(path, f"must be {' or '.join(dict.fromkeys(forms))}") from None


def _path_of(value: Any, error: ErrorDetails) -> str:
    return _path(value, _place(error), error["type"] in ("missing", MISSING, _NO_KIND))


def _place(error: ErrorDetails) -> tuple[int | str, ...]:
    if error["type"] in (_UNKNOWN_KIND, _NO_KIND):
        return (*error["loc"], error["ctx"]["discriminator"].strip("'"))
    return (*error["loc"], error["ctx"]["field"]) if error["type"] in (UNKNOWN, MISSING) else error["loc"]


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
    """Returns a value as JSON. In a thread, arrays of NumPy are written in pieces: other threads run in between."""
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

    A form may have the name of a field. The result with the field at fault wins over another result of its length.
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
    if words := _PROBLEMS.get(error["type"]):
        return words.format(**error.get("ctx", {}))
    message = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
