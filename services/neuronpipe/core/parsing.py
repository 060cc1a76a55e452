"""Parses messages of callers once it is known what they become: two bytes of a message can make an object of a hundred.

The limit holds for what a body in JSON becomes, too (doors/http/bodies.py).
"""

import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TypeAlias, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from neuronpipe.core.errors import InvalidInput

MessageT = TypeVar("MessageT", bound=Message)

# Memory for the objects that are made of one message, beside its bytes.
MAX_OBJECT_BYTES = 16 << 20
# In upb a message takes 40 to 100 bytes with its place in a list, and a number of a packed list up to 8. Reading a
# field takes 0.1 µs, in which no other thread runs.
_FIELD_BYTES, _NUMBER_BYTES = 128, 16
# A field has two bytes at least, so smaller messages need no look.
_COUNTED_FROM_BYTES = 2 * MAX_OBJECT_BYTES // _FIELD_BYTES
# After so many fields, other threads get their turn: they would get it after 5 ms only, each time.
_FIELDS_A_TURN = 1024
_PAUSE_S = 5e-5
# Of what a request has beside its input, such as its model.
_NAMES_BYTES = 64 << 10
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)
# The bytes of a number in a packed list; those of other types have at least one.
_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
}
_NOT_PACKED = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
# A field's name, its message where it is one, and the bytes of a number where it is a list of them, else 0.
_Field: TypeAlias = tuple[str, Descriptor | None, int]


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """A message. Raises DecodeError, and InvalidInput for one that would take too much memory."""
    return parser(kind)(data)


def parser(
    kind: type[MessageT], message: Descriptor | None = None, max_text_bytes: int = sys.maxsize
) -> Callable[[bytes], MessageT]:
    """What parses bytes as `parse` does; for large ones, call it in a thread. `message`: what the bytes are, of which
    `kind` may leave parts as they are. `max_text_bytes`: of all its texts and images together.
    """
    from_string, descriptor = kind.FromString, message or cast(Descriptor, kind.DESCRIPTOR)

    def parse_counted(data: bytes) -> MessageT:
        if len(data) > _COUNTED_FROM_BYTES:
            _check_size(descriptor, data, max_text_bytes)
        return from_string(data)

    return parse_counted


def _check_size(message: Descriptor, data: bytes, max_text_bytes: int) -> None:
    """Raises InvalidInput for a message of which too much would be made, or whose texts are too long.

    It goes from field to field (https://protobuf.dev/programming-guides/encoding/), also within messages, and skips
    texts. It ends where a message is broken, as the parser does.
    """
    fields, end, position, count, size_bytes, text_bytes = _fields_of(message), len(data), 0, 0, 0, 0
    outer: list[tuple[str, Mapping[int, _Field], int]] = []
    try:
        while True:
            while position >= end:
                if position > end or not outer:
                    return
                _, fields, end = outer.pop()
            tag = data[position]
            position += 1
            if tag >= 0x80:
                tag, position = _varint(data, position - 1)
            kind, inner = tag & 7, None
            size_bytes += _FIELD_BYTES
            count += 1
            if not count % _FIELDS_A_TURN:
                time.sleep(_PAUSE_S)
            if kind == _DELIMITED:
                length = data[position]
                position += 1
                if length >= 0x80:
                    length, position = _varint(data, position - 1)
                if position + length > end:
                    return
                name, inner, width = fields.get(tag >> 3, _UNKNOWN)
                if width:
                    size_bytes += length // width * _NUMBER_BYTES
                elif not inner:
                    text_bytes += length
                    if text_bytes > max_text_bytes + _NAMES_BYTES:
                        raise InvalidInput(
                            ".".join([*(name for name, *_ in outer), name]),
                            f"more than {max_text_bytes} bytes; the limits are the gateway's max_input_bytes, and of "
                            "images max_image_bytes",
                        )
                if not (inner and length):
                    position += length
                    inner = None
            elif kind == _VARINT:
                while data[position] >= 0x80:
                    position += 1
                position += 1
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            elif kind not in _GROUPS:
                return
            if size_bytes > MAX_OBJECT_BYTES:
                path = [name for name, *_ in outer]
                raise _too_much(".".join([*path, fields.get(tag >> 3, _UNKNOWN)[0]]))
            if inner:
                outer.append((name, fields, end))
                fields, end = _fields_of(inner), position + length
    except IndexError:
        return


_UNKNOWN: _Field = ("unknown fields", None, 0)


@cache
def _fields_of(message: Descriptor) -> Mapping[int, _Field]:
    return {
        field.number: (
            field.name,
            field.message_type,
            _WIDTHS.get(field.type, 1) if field.is_repeated and field.cpp_type not in _NOT_PACKED else 0,
        )
        for field in message.fields
    }


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and where it ends. Raises IndexError for one that is broken."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError


def too_long(field: str, max_bytes: int) -> InvalidInput:
    """The error for a text that is too long to be an input."""
    return InvalidInput(field, f"more than {max_bytes} bytes, the limit (the gateway's max_input_bytes)")


def _too_much(field: str) -> InvalidInput:
    fields, numbers = MAX_OBJECT_BYTES // _FIELD_BYTES, MAX_OBJECT_BYTES // _NUMBER_BYTES
    return InvalidInput(
        field, f"holds too much: one message takes {fields} fields, or {numbers} numbers, the limit; send fewer at once"
    )
