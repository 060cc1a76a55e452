"""Makes messages from their descriptors, so that a new field is covered by itself, and changes them.

All that is drawn comes from one `random.Random`: of a seed, or one of hypothesis, which then makes a failure smaller.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_MAX_DEPTH = 6
_COUNTS = (0, 1, 1, 1, 2, 3, 8)
_MANY = 300
_LONG = 6000
_TEXTS = (
    *("", " ", "a", "A fine day.", "Paris is the [MASK] of France.", "\x00", "{}"),
    "ﬁ ß İ ǆ",
    "日本語",
    "👩‍👩‍👧‍👦",
    "é́́",
    "\ufeff",
    "[SEP]",
)
_INTEGERS = (0, 1, 2, 3, 5, 127, 128, 255, 1000, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e-45, 3e38)
_ALPHABET = "abc XYZ.,'\"\n\t01[]#äßλ中😀\u0301\u200d"

_Kind = FieldDescriptor
_RANGES = {
    _Kind.TYPE_INT32: (-(2**31), 2**31 - 1),
    _Kind.TYPE_SINT32: (-(2**31), 2**31 - 1),
    _Kind.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    _Kind.TYPE_UINT32: (0, 2**32 - 1),
    _Kind.TYPE_FIXED32: (0, 2**32 - 1),
    _Kind.TYPE_INT64: (-(2**63), 2**63 - 1),
    _Kind.TYPE_SINT64: (-(2**63), 2**63 - 1),
    _Kind.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    _Kind.TYPE_UINT64: (0, 2**64 - 1),
    _Kind.TYPE_FIXED64: (0, 2**64 - 1),
}

# Makes the fields of a message agree with each other, which chance hardly ever does.
Agree = Callable[[Message, random.Random], None]


class Maker:
    """Makes messages.

    `words`: by a field's name, what leads somewhere. `seeds`: by a message's full name, right ones, which are changed.
    `agree`: by a message's full name.
    """

    def __init__(
        self,
        chance: random.Random,
        words: Mapping[str, Sequence[str]],
        seeds: Mapping[str, Sequence[Message]],
        agree: Mapping[str, Agree],
    ) -> None:
        self._chance = chance
        self._words = words
        self._seeds = seeds
        self._agree = agree

    def data(self, descriptor: Descriptor) -> bytes:
        """The bytes of a message: one made of nothing, or a right one that is changed; in a fifth of them, bytes are
        changed as well.
        """
        seeds = self._seeds.get(descriptor.full_name)
        if seeds and self._chance.random() < 0.6:
            message = type(seeds[0])()
            message.CopyFrom(self._chance.choice(seeds))
            for _ in range(self._chance.choice((0, 1, 1, 2, 4))):
                self.change(message)
        else:
            message = self.make(descriptor)
        data = message.SerializeToString(deterministic=True)
        return change_bytes(data, self._chance) if self._chance.random() < 0.2 else data

    def make(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """A message with fields of any value."""
        message: Message = GetMessageClass(descriptor)()
        # By number: a descriptor's object in Python lives no longer than what refers to it.
        chosen = {
            self._chance.choice(oneof.fields).number for oneof in descriptor.oneofs if self._chance.random() < 0.9
        }
        for field in descriptor.fields:
            if field.number in chosen if field.containing_oneof else self._chance.random() < 0.6:
                self._fill(message, field, depth)
        agree = self._agree.get(descriptor.full_name)
        if agree and self._chance.random() < 0.7:
            agree(message, self._chance)
        return message

    def change(self, message: Any, depth: int = 0) -> None:
        """Changes one field, somewhere in the message."""
        descriptor = message.DESCRIPTOR
        inner = [field for field, _ in message.ListFields() if field.type == _Kind.TYPE_MESSAGE and not _is_map(field)]
        if inner and depth < _MAX_DEPTH and self._chance.random() < 0.7:
            field = self._chance.choice(inner)
            value = getattr(message, field.name)
            self.change(self._chance.choice(value) if field.is_repeated else value, depth + 1)
        elif descriptor.fields:
            chosen = self._chance.choice(descriptor.fields)
            if self._chance.random() < 0.3 or not chosen.is_repeated:
                message.ClearField(chosen.name)
            if self._chance.random() < 0.8:
                self._fill(message, chosen, depth)

    def _fill(self, message: Message, field: Any, depth: int) -> None:
        if field.type == _Kind.TYPE_MESSAGE and depth >= _MAX_DEPTH:
            return
        if _is_map(field):
            self._fill_map(getattr(message, field.name), field.message_type, depth)
        elif field.is_repeated:
            count = self._chance.choice(_COUNTS) if self._chance.random() < 0.98 else self._chance.randrange(_MANY)
            values = [self._value(field, depth) for _ in range(min(count, 8))]
            getattr(message, field.name).extend(values * (count // 8 or 1))
        elif field.type == _Kind.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(self._value(field, depth))
        else:
            setattr(message, field.name, self._value(field, depth))

    def _fill_map(self, values: Any, entry: Descriptor, depth: int) -> None:
        for _ in range(self._chance.choice(_COUNTS)):
            key = self._value(entry.fields_by_name["key"], depth)
            value = self._value(entry.fields_by_name["value"], depth)
            if isinstance(value, Message):
                values[key].CopyFrom(value)
            else:
                values[key] = value

    def _value(self, field: Any, depth: int) -> Any:
        if field.type == _Kind.TYPE_MESSAGE:
            return self.make(field.message_type, depth + 1)
        if field.type == _Kind.TYPE_STRING:
            words = self._words.get(field.name, ())
            return self._chance.choice(words) if words and self._chance.random() < 0.7 else make_text(self._chance)
        if field.type == _Kind.TYPE_BYTES:
            return self._chance.randbytes(self._chance.choice((0, 1, 4, 8, 64, 1000)))
        if field.type == _Kind.TYPE_BOOL:
            return self._chance.random() < 0.5
        if field.type == _Kind.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return self._chance.choice([*known, *known, max(known) + 1, -1])
        if field.type in _RANGES:
            return make_integer(self._chance, *_RANGES[field.type])
        return self._chance.choice(_FLOATS) if self._chance.random() < 0.5 else self._chance.uniform(-10, 10)


def make_text(chance: random.Random) -> str:
    """A text: one of those that are known to be difficult, or one of any letters, a few of them long."""
    kind = chance.random()
    if kind < 0.5:
        return chance.choice(_TEXTS)
    size = chance.randrange(40) if kind < 0.97 else chance.randrange(_LONG)
    return "".join(chance.choice(_ALPHABET) for _ in range(min(size, 60))) * (1 + size // 60)


def make_integer(chance: random.Random, smallest: int, largest: int) -> int:
    """An integer, mostly a small one or one at a bound."""
    if chance.random() < 0.5:
        return max(smallest, min(largest, chance.randrange(12)))
    value = chance.choice(_INTEGERS) * chance.choice((1, 1, -1))
    return value if smallest <= value <= largest else chance.choice((smallest, largest))


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes that differ: flipped, cut, repeated, put in; or a tag with a length that is not there."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(changed) + 1)
        kind = chance.randrange(6)
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            del changed[place : place + chance.randrange(8)]
        elif kind == 3:
            changed[place:place] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 4:
            changed[place:place] = changed[place : place + chance.randrange(64)] * chance.choice((1, 2, 20))
        else:
            # A length of almost 4 GiB; a group that never ends; a field number of 29 bits; a varint of ten bytes.
            tails = (b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 200, b"\xfa\xff\xff\xff\x0f\x00", b"\x08" + b"\xff" * 10)
            changed[place:place] = chance.choice(tails)
    return bytes(changed)


def _is_map(field: Any) -> bool:
    kind = field.message_type
    return bool(kind) and kind.GetOptions().map_entry
