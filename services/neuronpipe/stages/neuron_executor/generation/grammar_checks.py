"""Refuses grammars that llguidance would follow wrongly, or at a cost that it does not count."""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import chain
from typing import Any

from neuronpipe.stages.neuron_executor.generation.schema_repairs import PATTERNS_OF_FORMAT
from neuronpipe.stages.neuron_executor.generation.schema_work import MOST_NEXT, MOST_WORK, SchemaWork

# llguidance finds multiples of a number by an automaton with as many states, which its own limits do not count: a
# million states take 14 s and 400 MB.
_MAX_MULTIPLES = 10_000
# llguidance computes intersections of terms of a grammar in a time that each term doubles.
_MAX_INTERSECTIONS = 8
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|#).*')
_JSON_IN_LARK = re.compile(r"%json\s*")
# llguidance computes with 64-bit floats, which do not represent larger integers exactly, and ignores bounds beyond.
_MAX_EXACT, _MAX_INT64 = 1 << 53, (1 << 63) - 1
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WITH_NUMBERS = ("const", "enum", *_BOUNDS)
# Python refuses to read longer whole numbers.
_MAX_NUMBER_DIGITS = 4300


def check_grammar(option: str, text: str) -> None:
    """Raises ValueError for a grammar that llguidance must not get, and for schemas that are not JSON.

    `option`: the field of the options that contains the text.
    """
    decoder = json.JSONDecoder(parse_float=Decimal, parse_int=_whole_number)
    if option == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends within an escape")
    if option == "json_schema":
        _check_schemas([decoder.decode(text)])
    if option == "grammar":
        schemas = [schema for _, _, schema in schemas_in(text, decoder)]
        if _QUOTED.sub("", text).count("&") > _MAX_INTERSECTIONS:
            raise ValueError(f"it has more than {_MAX_INTERSECTIONS} intersections (&), the limit")
        _check_schemas(schemas)


def schemas_in(grammar: str, decoder: json.JSONDecoder) -> Iterator[tuple[int, int, Any]]:
    """Yields the begin, the end and the value of each schema in a grammar in Lark. Raises ValueError."""
    at = 0
    while place := _JSON_IN_LARK.search(grammar, at):
        schema, at = decoder.raw_decode(grammar, place.end())
        yield place.end(), at, schema


def _check_schemas(schemas: list[Any]) -> None:
    """Raises ValueError if the schemas of a grammar cost too much together, or if one would be followed wrongly."""
    works = [SchemaWork(schema, PATTERNS_OF_FORMAT) for schema in schemas]
    units = sum(work.units for work in works)
    if units > MOST_WORK:
        raise ValueError(
            f"to compile it would cost {units:.3g}, the limit is {MOST_WORK:.3g}: properties of each object, squared, "
            "for each combination that anyOf and allOf leave"
        )
    if (most := max([work.most_next for work in works], default=0)) > MOST_NEXT:
        raise ValueError(f"{most} properties may come next in a text, the limit is {MOST_NEXT}: require some of them")
    states = Decimal(0)
    for schema in chain.from_iterable(map(_parts, schemas)):
        if isinstance(schema, dict):
            _check_numbers(schema)
            if isinstance(multiple := schema.get("multipleOf"), int | Decimal):
                states += _states(Decimal(multiple))
    if states > _MAX_MULTIPLES:
        raise ValueError(
            f"the values of multipleOf add up to more than {_MAX_MULTIPLES}, in units of their last digits"
        )


def _check_numbers(schema: dict[str, Any]) -> None:
    for keyword in (name for name in _WITH_NUMBERS if name in schema):
        for number in _parts(schema[keyword]):
            if isinstance(number, int | Decimal) and not _is_exact(Decimal(number).copy_abs(), keyword in _BOUNDS):
                raise ValueError(f"{keyword} has a number beyond {_MAX_EXACT} that a float of 64 bits has not")
    least, required = schema.get("minProperties"), schema.get("required")
    named = len({*map(str, required)}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > named + 1:
        raise ValueError(f"minProperties of {least} and {named} required ones, others may have the same name")


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_NUMBER_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits, the limit is {_MAX_NUMBER_DIGITS}")
    return int(digits)


def _parts(value: Any) -> Iterator[Any]:
    """Yields a value of JSON, and all values that it contains."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(part)


def _states(multiple: Decimal) -> Decimal:
    if abs(multiple.adjusted()) > 20:  # too large to compute with
        return Decimal("inf")
    exponent = multiple.normalize().as_tuple().exponent
    return abs(multiple.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else multiple)


def _is_exact(number: Decimal, is_bound: bool) -> bool:
    if number >= _MAX_INT64:
        return is_bound or number == _MAX_INT64
    return number <= _MAX_EXACT or Decimal(float(number)) == number
