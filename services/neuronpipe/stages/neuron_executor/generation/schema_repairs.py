"""Repairs JSON Schemas, so that llguidance follows formats and patterns that it does not know."""

import re
from typing import Any

from neuronpipe.stages.neuron_executor.generation.schema_work import BY_NAME

# Further patterns for texts of these formats. Without them, Python refuses some texts as dates or times: leap years
# exist, the year 0 and the second 60 do not.
_DATE = (
    "^([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-",
    "^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)",
)
_UUIDS = {f"uuid{version}": (f"^.{{14}}{version}",) for version in range(1, 9)}
_PATTERNS = {
    "date": _DATE,
    "time": ("^[0-9]{2}:[0-9]{2}:[0-5]",),
    "date-time": (*_DATE, "[Tt][0-9]{2}:[0-9]{2}:[0-5]"),
    **_UUIDS,
    **{
        name: (f"^([{signs}]{{4}})*([{signs}]{{2}}==|[{signs}]{{3}}=)?$",)
        for name, signs in (("base64", "A-Za-z0-9+/"), ("base64url", "A-Za-z0-9_-"))
    },
}
# The number of patterns that a text of a format must match.
PATTERNS_OF_FORMAT = {name: 1 + len(patterns) for name, patterns in _PATTERNS.items()}
# Formats of pydantic that llguidance does not know, each with a format that its texts also have; empty: any text.
_WIDER_FORMATS = {
    **dict.fromkeys(("path", "file-path", "directory-path", "password", "binary", "base64", "base64url"), ""),
    **dict.fromkeys(("ipv4network", "ipv4interface", "ipvanyaddress", "ipvanynetwork", "ipvanyinterface"), "ipv4"),
    **dict.fromkeys(("ipv6network", "ipv6interface"), "ipv6"),
    **dict.fromkeys(_UUIDS, "uuid"),
}
# The start of pydantic's pattern of a Decimal, which has a look-ahead. llguidance supports none.
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
_MAX_DIGITS = 64
# All names are strings, so this says nothing; zod writes it for records.
_ANY_NAMES = "propertyNames", {"type": "string"}


def repaired(schema: Any) -> Any:
    """Expresses the formats of a schema in keywords that llguidance knows. Drops keywords that say nothing.

    `uniqueItems` is omitted, because llguidance cannot follow it: the model decides whether items repeat.
    """
    if isinstance(schema, list):
        return [repaired(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    new: dict[str, Any] = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            new[name] = {key: repaired(inner) for key, inner in value.items()}
        elif (name, value) != _ANY_NAMES and name != "uniqueItems":
            new[name] = value if name in ("const", "enum") else repaired(value)
    if isinstance(pattern := schema.get("pattern"), str) and pattern.startswith(_DECIMAL):
        new["pattern"] = _decimal(pattern)
    if isinstance(format_name := schema.get("format"), str):
        if wider := _WIDER_FORMATS.get(format_name, format_name):
            new["format"] = wider
        else:
            del new["format"]
        if patterns := _PATTERNS.get(format_name):
            own_schemas = [{"allOf": new["allOf"]}] if "allOf" in new else []
            new["allOf"] = [*own_schemas, *({"pattern": pattern} for pattern in patterns)]
    return new


def _decimal(pattern: str) -> str:
    """Writes a pattern without look-ahead for pydantic's pattern of a Decimal.

    Both patterns accept the same texts: numbers with a digit before the decimal point and, if it exists, behind it.
    """
    whole, places = (
        int(match[1]) if (match := re.search(limit, pattern)) else None
        for limit in (r"\\d\{0,(\d+)\}\|", r"\.\??\\d\{0,(\d+)\}0\*\$\)?$")
    )
    if whole is None:
        fraction = "" if places == 0 else r"(\.\d+)?" if places is None else rf"(\.\d{{1,{places}}})?"
        return rf"^[+-]?\d+{fraction}$"
    if places is not None:
        digits = int(match[1]) - 1 if (match := re.search(r"\]\{1,(\d+)\}", pattern)) else 0
        places = min(places, digits)
        fraction = rf"(\.\d{{1,{places}}})?" if places else ""
        before = rf"\d{{1,{whole}}}" if whole else "0"
        return f"^[+-]?{before}{fraction}$"
    if whole > _MAX_DIGITS:
        return pattern  # llguidance refuses it
    parted = "".join(rf"|\d{{{count}}}\.\d{{1,{whole - count}}}" for count in range(1, whole))
    return rf"^[+-]?(\d{{1,{whole}}}{parted})$"
