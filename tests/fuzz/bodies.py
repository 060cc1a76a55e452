"""Makes JSON from the schemas of /openapi.json, so that a new field is covered by itself."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fuzz.messages import change_bytes, make_integer, make_text

_MAX_DEPTH = 6
_ODD: Sequence[Any] = (None, True, 0, -1, 1.5, "", "a", [], {}, [None], {"": None}, [[[[[]]]]], 1e308, 2**64, "\ud800")
_COUNTS = (0, 1, 1, 2, 3, 40)


class Bodies:
    """Makes bodies of requests. `schemas`: the shared ones of the document. `words`: by a property's name, what leads
    somewhere.
    """

    def __init__(self, chance: random.Random, schemas: Mapping[str, Any], words: Mapping[str, Sequence[str]]) -> None:
        self._chance = chance
        self._schemas = schemas
        self._words = words

    def data(self, schema: Mapping[str, Any]) -> bytes:
        """The bytes of a body; in a fifth of them, bytes are changed."""
        data = json.dumps(self.value(schema)).encode()
        return change_bytes(data, self._chance) if self._chance.random() < 0.2 else data

    def value(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """A value that the schema allows, or now and then one of any other kind."""
        if self._chance.random() < 0.04:
            return self._chance.choice(_ODD)
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], name, depth)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.value(self._chance.choice(schema[several]), name, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._chance.choice(schema["enum"])
        if name in self._words and schema.get("type") == "string" and self._chance.random() < 0.7:
            return self._chance.choice(self._words[name])
        return self._of_type(schema, name, depth)

    def _of_type(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        chance = self._chance
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                required = schema.get("required", ())
                return {
                    key: self.value(inner, key, depth + 1)
                    for key, inner in properties.items()
                    if depth < _MAX_DEPTH and chance.random() < (0.97 if key in required else 0.4)
                } | ({make_text(chance): 1} if chance.random() < 0.1 else {})
            case "array":
                if "prefixItems" in schema:
                    return [self.value(inner, name, depth + 1) for inner in schema["prefixItems"]]
                count = chance.choice(_COUNTS) if depth < _MAX_DEPTH else 0
                return [self.value(schema.get("items", {}), name, depth + 1) for _ in range(count)]
            case "string":
                return make_text(chance)
            case "integer":
                return make_integer(chance, schema.get("minimum", -(2**63)), schema.get("maximum", 2**64))
            case "number":
                return chance.uniform(-10, 10)
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return chance.choice(_ODD)
