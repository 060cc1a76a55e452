"""Parses messages of callers after a check of their size in memory: two bytes of a message can make an object of a
hundred.

The same limit applies to bodies in JSON (doors/http/json_limits.py). Compressed data has a limit of its own.
"""

import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeAlias, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from neuronpipe.core.errors import InvalidInput

MessageT = TypeVar("MessageT", bound=Message)

# Memory for the objects that are made of one message, in addition to its bytes.
MAX_OBJECT_BYTES = 16 << 20
# In upb a message takes 40 to 100 bytes with its place in a list, and a number of a packed list up to 8. Reading a
# field takes 0.1 µs, in which no other thread runs.
_FIELD_BYTES, _NUMBER_BYTES = 128, 16
# A field has two bytes at least, so smaller messages need no check.
_COUNTED_FROM_BYTES = 2 * MAX_OBJECT_BYTES // _FIELD_BYTES
# Other threads get a turn after this number of fields. Without a pause, each turn would come after 5 ms.
_FIELDS_A_TURN = 1024
_PAUSE_S = 5e-5
# Bytes of a request's texts that are not its input, such as the model's name.
_NAMES_BYTES = 64 << 10
# The depth of lists and objects in JSON. Templates and json take several calls for each level; Python's limit is 1,000.
_MAX_DEPTH = 128
_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
# Bytes that are counted at once, in less than a millisecond.
_PIECE_BYTES = 128 << 10
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)
# The bytes of a number in a packed list; numbers of other types have at least one byte.
_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
}
_NOT_PACKED = (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
# A field's name; the type of its message, if any; and the bytes of a number if the field is a list of numbers, else 0.
_Field: TypeAlias = tuple[str, Descriptor | None, int]


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Parses a message. Raises DecodeError, and InvalidInput for a message that would take too much memory."""
    return parser(kind)(data)


def parser(
    kind: type[MessageT], message: Descriptor | None = None, max_text_bytes: int = sys.maxsize
) -> Callable[[bytes], MessageT]:
    """Returns a function that parses bytes as `parse` does. Call it in a thread for large messages.

    `message`: the type of the bytes, if `kind` leaves parts of it unparsed. `max_text_bytes`: the limit for all texts
    and images of a message together.
    """
    from_string, descriptor = kind.FromString, message or cast(Descriptor, kind.DESCRIPTOR)

    def parse_counted(data: bytes) -> MessageT:
        if len(data) > _COUNTED_FROM_BYTES:
            _check_size(descriptor, data, max_text_bytes)
        return from_string(data)

    return parse_counted


def _check_size(message: Descriptor, data: bytes, max_text_bytes: int) -> None:
    """Raises InvalidInput if the message's objects would take too much memory, or its texts are too long.

    Walks from field to field (https://protobuf.dev/programming-guides/encoding/), also within messages, and skips
    texts. Stops where a message is broken, as the parser does.
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
                tag, position = varint(data, position - 1)
            kind, inner = tag & 7, None
            size_bytes += _FIELD_BYTES
            count += 1
            if not count % _FIELDS_A_TURN:
                time.sleep(_PAUSE_S)
            if kind == _DELIMITED:
                length = data[position]
                position += 1
                if length >= 0x80:
                    length, position = varint(data, position - 1)
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


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it. Raises IndexError if the number is broken."""
    number = data[position]
    if number < 0x80:  # the usual case
        return number, position + 1
    number = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError


# A mark in the bytes of JSON → memory of the value that is made for it. Rows become plain values, which take less than
# the checked values of bodies (doors/http/json_limits.py).
_VALUE_BYTES = {b",": 64, b"[": 128, b"{": 256}
TOO_MANY_VALUES = f"holds too many values: they would take more than {MAX_OBJECT_BYTES >> 20} MiB, the limit"


def too_much(row: bytes) -> str:
    """Returns the problem of a row of a file in JSON that exceeds the memory of one message; empty for none."""
    return TOO_MANY_VALUES if takes_too_much(row, _VALUE_BYTES) else ""


def takes_too_much(data: bytes, bytes_by_mark: Mapping[bytes, int]) -> bool:
    """Returns whether the values of a text in JSON would take more than the memory of one message.

    A mark outside of strings stands for one value. `bytes_by_mark`: the memory of the value, by its mark.
    """
    pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
    return not (_is_within(pieces, bytes_by_mark) or _is_within(_outside_of_strings(data), bytes_by_mark))


def _is_within(pieces: Iterable[bytes], bytes_by_mark: Mapping[bytes, int]) -> bool:
    size_bytes = 0
    for piece in pieces:
        size_bytes += sum(piece.count(mark) * value_bytes for mark, value_bytes in bytes_by_mark.items())
        if size_bytes > MAX_OBJECT_BYTES:
            return False
    return True


def too_many_bytes(field: str, max_bytes: int) -> InvalidInput:
    """Returns the error for a text that is too long to be an input."""
    return InvalidInput(field, f"more than {max_bytes} bytes, the limit (the gateway's max_input_bytes)")


def check_depth(field: str, data: bytes) -> None:
    """Raises InvalidInput if the JSON is nested too deeply for its readers. Call it before the text is parsed."""
    if data.count(b"[") + data.count(b"{") <= _MAX_DEPTH:
        return
    depth = 0
    for piece in _outside_of_strings(data):
        marks = np.frombuffer(piece, np.uint8)
        depths = depth + np.cumsum(_STEPS[marks], dtype=np.int32)
        if depths.size:
            if depths.max() > _MAX_DEPTH:
                raise InvalidInput(field, f"lists and objects are nested more than {_MAX_DEPTH} deep, the limit")
            depth = int(depths[-1])


def _outside_of_strings(data: bytes) -> Iterator[bytes]:
    """Yields the pieces of a text in JSON without its strings."""
    is_quoted, end = False, 0
    while end < len(data):
        begin, end = end, min(end + _PIECE_BYTES, len(data))
        while end < len(data) and data[end - 1 : end] == b"\\":  # no cut behind a backslash
            end += 1
        text = data[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        characters = np.frombuffer(text, np.uint8)
        are_quoted = np.logical_xor.accumulate(characters == ord('"')) ^ is_quoted
        yield characters[~are_quoted].tobytes()
        if text:
            is_quoted = bool(are_quoted[-1])


def _too_much(field: str) -> InvalidInput:
    fields, numbers = MAX_OBJECT_BYTES // _FIELD_BYTES, MAX_OBJECT_BYTES // _NUMBER_BYTES
    return InvalidInput(
        field, f"holds too much: one message takes {fields} fields, or {numbers} numbers, the limit; send fewer at once"
    )


_INPUT_BYTES, _MIN_INPUT_BYTES = 64 << 10, 1 << 10
_OUTPUT_BYTES = 1 << 20
_GZIP_MARK = b"\x1f\x8b"
# Maximum number of members in data of gzip: empty members take time without a limit. bgzip writes a member for each
# 64 KiB.
_MAX_MEMBERS = 2048


class Truncated(Exception):
    """The compressed data ends too early, or continues after its end."""


def inflate(data: bytes, window_bits: int, max_bytes: int) -> bytes | None:
    """Returns decompressed data; None if it has more than `max_bytes`. Raises Truncated, and zlib.error.

    Data of gzip may have several members (RFC 1952, 2.2).
    """
    # Decompressed twice, first in pieces for the size: joining pieces would hold the GIL for tens of milliseconds.
    view, members, left_bytes, end = memoryview(data), list[tuple[memoryview, int]](), max_bytes, 0
    while not members or end < len(data):
        begin = end
        if members and (len(members) == _MAX_MEMBERS or not data[:2] == data[begin : begin + 2] == _GZIP_MARK):
            raise Truncated
        end, size_bytes = _measure(view, begin, window_bits, left_bytes)
        left_bytes -= size_bytes
        if left_bytes < 0:
            return None
        members.append((view[begin:end], size_bytes))
    inflated = [zlib.decompress(member, window_bits, max(size_bytes, 1)) for member, size_bytes in members]
    return inflated[0] if len(inflated) == 1 else b"".join(inflated)


def _measure(data: memoryview, begin: int, window_bits: int, max_bytes: int) -> tuple[int, int]:
    """Returns the end of the compressed data that begins at a place, and its size when decompressed, for which a size
    above `max_bytes` is one too large. Raises Truncated, and zlib.error.
    """
    reader, size_bytes, place = zlib.decompressobj(window_bits), 0, begin
    pending: bytes | memoryview = b""
    # The unused rest of a piece is copied, so pieces of later members are small at first.
    input_bytes = _MIN_INPUT_BYTES if begin else _INPUT_BYTES
    while not reader.eof:
        if not pending:
            pending = data[place : place + input_bytes]
            place += len(pending)
            input_bytes = min(2 * input_bytes, _INPUT_BYTES)
        piece = reader.decompress(pending, _OUTPUT_BYTES)
        size_bytes += len(piece)
        if size_bytes > max_bytes:
            break
        if not (piece or pending or reader.eof):
            raise Truncated
        pending = reader.unconsumed_tail
    return place - len(reader.unused_data), size_bytes
