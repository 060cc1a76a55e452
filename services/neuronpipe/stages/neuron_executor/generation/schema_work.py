"""Estimates llguidance's work to compile a JSON Schema, because nothing can limit the compilation itself.

A unit is a pair of properties of one object, which takes 0.13 µs (2026-11-28, a core with AVX-512): llguidance compares
each property with all others, for each combination that anyOf, oneOf and allOf leave. The other costs were measured
relative to it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any
from urllib.parse import unquote

# Half a second of work.
MOST_WORK = 4_000_000
# Maximum number of properties that may come next in a text, because no property before them is required. With 300, each
# token of a name takes up to 2 ms, and with 500, llguidance follows no text (2026-11-30).
MOST_NEXT = 300
# A pattern of names costs as much as this number of properties, unless there are more than 100 patterns.
_PATTERN_OF_NAMES = 20
# Each combination costs as much as an object with this number of properties.
_COMBINATION = 50
# The cost of two patterns that one text must match; each further pattern doubles it.
_PATTERNS, _MOST_PATTERNS = 400, 64
_BOUND = 1000
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
# Keywords whose values are schemas by name, and keywords whose values are no schemas.
BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_NO_SCHEMAS = frozenset(("const", "enum", "default", "examples"))
_CHOICES = "anyOf", "oneOf"
_REMARKS = frozenset(("title", "description", "default", "examples"))
# A schema whose keywords are all among these combines nothing.
_ALONE = _REMARKS | {"$defs", "definitions", "$schema", "$id", *_CHOICES}


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a schema.

    - `ways`: combinations.
    - `width`: properties of its object. `first`: properties that may come first.
    - `patterns`: the most patterns of one text.
    - `work`: units of the work to compile it, see MOST_WORK.

    All but the work add to the costs of a schema that contains this schema by allOf, anyOf, oneOf or $ref.
    """

    ways: float = 1
    width: int = 0
    first: int = 0
    patterns: int = 0
    work: float = 0


# The cost of a schema that says nothing, of which a document may have thousands.
_NO_COST = _Cost()


class SchemaWork:
    """The work of one document, in units. `formats`: number of patterns that each format becomes.

    `most_next`: the most properties of which any may come next in a text.
    """

    def __init__(self, root: Any, formats: dict[str, int]) -> None:
        self._root = root
        self._formats = formats
        self.most_next = 0
        # Costs by the identity of the schema. A schema counts nothing within itself.
        self._known: dict[int, _Cost] = {}
        self.units = self._of(root).work

    def _of(self, schema: Any) -> _Cost:
        if not isinstance(schema, dict) or not schema:
            return _NO_COST
        if id(schema) not in self._known:
            self._known[id(schema)] = _NO_COST
            cost = self._of(self._target(schema["$ref"])) if _is_link(schema) else self._computed(schema)
            self._known[id(schema)] = cost
        return self._known[id(schema)]

    def _computed(self, schema: dict[str, Any]) -> _Cost:
        all_of = [self._of(part) for part in _items(schema.get("allOf"))]
        if "$ref" in schema:
            all_of.append(self._of(self._target(schema["$ref"])))
        choices = [costs for name in _CHOICES if (costs := [self._of(part) for part in _items(schema.get(name))])]
        patterns_of_names = len(_items(schema.get("patternProperties")))
        properties = len(_items(schema.get("properties"))) + _PATTERN_OF_NAMES * patterns_of_names
        ways = prod(cost.ways for cost in all_of) * prod(sum(cost.ways for cost in costs) for costs in choices)
        width = properties + sum(cost.width for cost in all_of)
        width += sum(max(cost.width for cost in costs) for costs in choices)
        first, longest = _optional(schema)
        others = sum(cost.first for cost in all_of)
        others += sum(cost.first for name in _CHOICES for cost in self._different(schema.get(name)))
        self.most_next = max(self.most_next, longest + others)
        name = schema.get("format")
        patterns = ("pattern" in schema) + (self._formats.get(name, 1) if isinstance(name, str) else 0)
        patterns += sum(cost.patterns for cost in all_of)
        patterns += sum(max(cost.patterns for cost in costs) for costs in choices)
        inner = [*_below(schema)]
        work: float = _BOUND * len(_BOUNDS & schema.keys())
        if all_of or (choices and schema.keys() - _ALONE):  # llguidance combines them
            below = sum(cost.work for costs in (all_of, *choices) for cost in costs)
            work += ways * (below + (width + _COMBINATION) ** 2)
        else:
            inner += [part for name in _CHOICES for part in _items(schema.get(name))]
            work += properties**2
        # The target of a link is compiled once, at its own place.
        work += sum(self._of(part).work for part in inner if not _is_link(part))
        work += _PATTERNS * 2 ** min(patterns, _MOST_PATTERNS) if patterns > 1 else 0
        below_patterns = max((self._of(part).patterns for part in inner), default=0)
        return _Cost(ways, width, first + others, max(patterns, below_patterns), work)

    def _different(self, choices: Any) -> Iterable[_Cost]:
        """Yields the costs of choices. A schema to which several choices lead counts once."""
        targets = {id(self._target(part["$ref"]) if _is_link(part) else part): part for part in _items(choices)}
        return map(self._of, targets.values())

    def _target(self, link: Any) -> Any:
        """Finds the schema that a link within the document leads to; None for other links."""
        if not isinstance(link, str) or not link.startswith("#"):
            return None
        names = (unquote(name).replace("~1", "/").replace("~0", "~") for name in link.split("/")[1:])
        return reduce(lambda value, name: value.get(name) if isinstance(value, dict) else None, names, self._root)


def _is_link(schema: Any) -> bool:
    return isinstance(schema, dict) and "$ref" in schema and not schema.keys() - _REMARKS - {"$ref"}


def _optional(schema: dict[str, Any]) -> tuple[int, int]:
    """Counts the properties before the first required property, and the most properties between two of these."""
    required = {*map(str, _items(schema.get("required")))}
    runs = [0]
    for name in _items(schema.get("properties")):
        runs += [0] if name in required else []
        runs[-1] += name not in required
    return runs[0], max(runs)


def _items(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | dict) else []


def _below(schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the schemas of the parts of a value."""
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            yield from value.values()
        elif name not in _NO_SCHEMAS and name not in _CHOICES and name != "allOf":
            yield from value if isinstance(value, list) else (value,)
