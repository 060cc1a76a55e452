"""Times, sizes and lists as people write them: 250ms, 10m, 256MiB; a,b."""

import re
from collections.abc import Mapping
from decimal import Decimal

_QUANTITY = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,2})?) ?([A-Za-z]*)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86_400)}
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# unit at the end of a name → units of values → factor
_FACTORS: Mapping[str, Mapping[str, Decimal | int]] = {
    "s": {"": 1, **_SECONDS},
    "ms": {"": 1, **{name: factor * 1000 for name, factor in _SECONDS.items()}},
    "bytes": {"": 1, **_SIZES},
}
_WORDS = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes"}


def words_of(text: str) -> list[str]:
    """Returns the words between commas, without spaces around them. Empty words do not count."""
    return [word for part in text.split(",") if (word := part.strip())]


def unit_of(name: str) -> str:
    """Returns the unit at the end of a setting's name: s, ms or bytes; empty for another name."""
    unit = name.rpartition("_")[2]
    return unit if unit in _FACTORS else ""


def in_unit(text: str, unit: str) -> float:
    """Converts a text such as 10m, or a bare number of `unit`, to a number of `unit`. Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if not match or match[2] not in _FACTORS[unit]:
        example = "256MiB or 1.5GB" if unit == "bytes" else "250ms, 30s, 10m or 2h"
        raise ValueError(f"{text!r}: must be a number of {_WORDS[unit]}, or a number with a unit, such as {example}")
    number = Decimal(match[1]) * _FACTORS[unit][match[2]]
    # Rounded down: 1.1MiB is not a whole number of bytes.
    return float(int(number) if unit == "bytes" and match[2] else number)
