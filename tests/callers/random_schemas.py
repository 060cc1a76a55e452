"""Draws JSON Schemas at random, with the keywords that structured output accepts (docs/generation.md)."""

import random
import string
from collections.abc import Callable
from typing import Any

_PATTERNS = ("^[a-z]{1,4}$", "^(north|south)-[0-9]{2}$", "^#[0-9a-f]{3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def random_schema(chance: random.Random) -> dict[str, Any]:
    """Draws a schema of small texts, so that a model which writes anything comes to an end."""
    schema = _schema(chance, depth=0)
    if chance.random() < 0.2:
        return {"$defs": {"part": _scalar(chance)}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    return schema


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_object, _array, _any_of]
    chosen = chance.randrange(len(kinds) + 3 * depth)
    return kinds[chosen](chance, depth) if chosen < len(kinds) else _scalar(chance)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = ["".join(chance.choices(string.ascii_lowercase + '"\\ é', k=chance.randint(1, 4))) for _ in range(4)]
    properties = {name: _schema(chance, depth + 1) for name in names[: chance.randint(1, 3)]}
    further = chance.choice([False, False, {"type": "boolean"}])
    required = [name for name in properties if chance.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": further}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    schema = {"type": "array", "items": _schema(chance, depth + 1), "minItems": least, "maxItems": least + 1}
    if chance.random() < 0.3:
        schema["prefixItems"] = [_scalar(chance) for _ in range(chance.randint(1, 2))]
    return schema


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, depth + 1) for _ in range(chance.randint(1, 3))]}


def _scalar(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-1000, 1000)
    made: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 8)},
        lambda: {"type": "string", "pattern": chance.choice(_PATTERNS)},
        lambda: {"type": "string", "format": chance.choice(_FORMATS)},
        lambda: {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 5000)},
        lambda: {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + chance.randint(20, 5000)},
        lambda: {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": chance.randint(2, 12)},
        lambda: {"type": "number", "minimum": low, "maximum": low + 10},
        lambda: {"type": ["boolean", "null"]},
        lambda: {"enum": chance.sample(["a", "b c", 'd"', 1, 2.5, True, None, [1, {"x": "y"}]], 3)},
        lambda: {"const": chance.choice(["é", 0, None, {"a": [1]}])},
    ]
    return chance.choice(made)()
