"""Messages and bodies of which much more is made than their bytes: made from descriptors and from schemas, so that a
new field is covered by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_MAX_DEPTH = 4
_DELIMITED = 2
_TEXT_TYPES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8),
}
# A field that no message has.
_UNKNOWN = 536_870_911
# What it is, and what makes its bytes.
Shape: TypeAlias = tuple[str, Callable[[], bytes]]


def expanding_messages(message: Descriptor, size_bytes: int) -> Iterator[Shape]:
    """Messages of about that size, with what they are: millions of the smallest values of each field that may have
    several, at each depth, of unknown fields, of fields that may have one, and messages in messages in messages. A
    field that is found at several places is filled at the first.
    """
    yield "unknown fields", lambda: field_of(_UNKNOWN, b"") * (size_bytes // 7)
    yield "unknown numbers", lambda: b"\xf8\xff\xff\xff\x0f\x01" * (size_bytes // 6)
    yield "one unknown text", lambda: field_of(_UNKNOWN, bytes(size_bytes))
    yield from _of_fields(message, size_bytes, (), (), set())


def _of_fields(
    message: Descriptor, size_bytes: int, path: tuple[FieldDescriptor, ...], names: tuple[str, ...], filled: set[str]
) -> Iterator[Shape]:
    new = [field for field in message.fields if field.full_name not in filled]
    filled.update(field.full_name for field in new)
    for field in new:
        name = ".".join((*names, field.name))
        is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        smallest: dict[str, bytes] = {}
        if is_message or field.type in _TEXT_TYPES:
            smallest["empty"] = field_of(field.number, b"")
            if field.type == FieldDescriptor.TYPE_STRING:
                smallest["short"] = field_of(field.number, b"a")
        else:
            smallest["numbers"] = _number(field)
        for kind, encoded in smallest.items():
            yield f"{name}: {kind}", partial(_many, path, encoded, size_bytes)
        if field.type == FieldDescriptor.TYPE_STRING:
            yield f"{name}: one text", partial(_one, path, field, b"a", size_bytes)
        if field.is_repeated and not is_message and field.type not in _TEXT_TYPES:
            yield f"{name}: packed", partial(_one, path, field, b"\0", size_bytes)
        if is_message and field.message_type in (message, *(parent.message_type for parent in path)):
            yield f"{name}: in itself", partial(_nested, path, field, size_bytes)
        elif field.message_type and len(path) < _MAX_DEPTH:
            yield from _of_fields(field.message_type, size_bytes, (*path, field), (*names, field.name), filled)


def field_of(number: int, value: bytes) -> bytes:
    """A field of a text, bytes or a message, as it is on the wire."""
    return _varint(number << 3 | _DELIMITED) + _varint(len(value)) + value


def _number(field: FieldDescriptor) -> bytes:
    width = _WIDTHS.get(field.type)
    kind = {None: 0, 4: 5, 8: 1}[width]
    return _varint(field.number << 3 | kind) + (b"\x01" + bytes(width - 1) if width else b"\x01")


def _many(path: tuple[FieldDescriptor, ...], encoded: bytes, size_bytes: int) -> bytes:
    return _within(path, encoded * (size_bytes // len(encoded)))


def _one(path: tuple[FieldDescriptor, ...], field: FieldDescriptor, byte: bytes, size_bytes: int) -> bytes:
    return _within(path, field_of(field.number, byte * size_bytes))


def _within(path: tuple[FieldDescriptor, ...], data: bytes) -> bytes:
    for field in reversed(path):
        data = field_of(field.number, data)
    return data


def _nested(path: tuple[FieldDescriptor, ...], field: FieldDescriptor, size_bytes: int) -> bytes:
    data = b""
    while len(data) < min(size_bytes, 1 << 12):  # parsers refuse a depth of 100
        data = field_of(field.number, data)
    return _within(path, data * (size_bytes // len(data)))


def _varint(number: int) -> bytes:
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


_VALUES = {
    "empty lists": b"[]",
    "empty objects": b"{}",
    "objects": b'{"text":""}',
    "empty texts": b'""',
    "texts": b'"a"',
    "numbers": b"1",
    "large numbers": b"123456",
    "fractions": b"0.5",
    "nulls": b"null",
    "lists in lists": b"[[[]]]",
    "quotes": b'"\\"\\\\"',
}
# Of a property, besides how it is checked.
_TEXTS = ("title", "description", "default")


def expanding_bodies(schema: Mapping[str, Any], schemas: Mapping[str, Any], size_bytes: int) -> Iterator[Shape]:
    """Bodies in JSON of about that size, with what they are: in place of each property, at each depth, many of the
    smallest values, one long text, and lists in lists. Of the properties that are checked alike, the first is filled.
    `schemas`: the shared ones of the document.
    """
    fills: dict[str, Callable[[], bytes]] = {
        kind: partial(lambda value: b"[" + b",".join([value] * (size_bytes // (len(value) + 1))) + b"]", value)
        for kind, value in _VALUES.items()
    }
    fills["one text"] = lambda: b'"' + b"a" * size_bytes + b'"'
    fills["a text of commas"] = lambda: b'"' + b"[,{:" * (size_bytes // 4) + b'"'
    fills["depth"] = lambda: b"[" * size_bytes
    fills["depth of objects"] = lambda: b'{"a":' * (size_bytes // 5)
    fills["names"] = lambda: b"{" + b",".join(b'"%x":0' % number for number in range(size_bytes // 10)) + b"}"
    places: dict[str, tuple[str, tuple[bytes, bytes]]] = {}
    for name, checked, around in _places(schema, schemas, 0):
        places.setdefault(checked, (name, around))
    for kind, make in fills.items():
        fill = cache(make)
        yield kind, fill
        for name, around in places.values():
            yield f"{name}: {kind}", partial(_filled, around, fill)


def _filled(around: tuple[bytes, bytes], fill: Callable[[], bytes]) -> bytes:
    return around[0] + fill() + around[1]


def _places(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int
) -> Iterator[tuple[str, str, tuple[bytes, bytes]]]:
    """Each place in a body, how it is checked, and what stands around it."""
    if depth > _MAX_DEPTH:
        return
    if "$ref" in schema:
        yield from _places(schemas[schema["$ref"].rpartition("/")[2]], schemas, depth + 1)
    for several in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(several, ()):
            yield from _places(part, schemas, depth)
    for name, inner in schema.get("properties", {}).items():
        others = [
            b'"%s":%s,' % (key.encode(), _some(of_key, schemas))
            for key, of_key in schema["properties"].items()
            if key in schema.get("required", ()) and key != name
        ]
        around = b"{" + b"".join(others) + b'"%s":' % name.encode(), b"}"
        yield name, repr({word: value for word, value in inner.items() if word not in _TEXTS}), around
        for deeper, checked, (before, behind) in _places(inner, schemas, depth + 1):
            yield f"{name}.{deeper}", checked, (around[0] + before, behind + around[1])
    if items := schema.get("items"):
        for deeper, checked, (before, behind) in _places(items, schemas, depth + 1):
            yield f"[].{deeper}", checked, (b"[" + before, behind + b"]")


def _some(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> bytes:
    """A right value, or nearly."""
    if "$ref" in schema:
        return _some(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return _some(schema[several][0], schemas)
    kinds = {"string": b'"a"', "array": b"[]", "object": b"{}", "boolean": b"true", "null": b"null"}
    return kinds.get(schema.get("type", ""), b"1")
