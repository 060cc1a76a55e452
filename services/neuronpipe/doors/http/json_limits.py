"""Counts the marks of a body in JSON before it is parsed: its values must not take too much memory."""

import re
from collections.abc import Mapping
from itertools import islice

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.parsing import MAX_OBJECT_BYTES, TOO_MANY_VALUES, takes_too_much

# A mark in the bytes of JSON → memory of the value that is made for it. A number or text takes up to 64 bytes, a list
# or a name in an object a few hundred, and an object a thousand once it is checked.
_JSON_BYTES = {b",": 64, b":": 256, b"[": 512, b"{": 1024}
LINE_BYTES = {b",": 64, b"\n": 64}
_LIST = re.compile(rb'"(\w{1,64})"\s*:\s*\[', re.ASCII)
# The smallest object with the comma behind it has 3 bytes, so shorter bodies cannot exceed the limit.
_COUNTED_FROM_BYTES = 3 * MAX_OBJECT_BYTES // max(_JSON_BYTES.values())


def check_values(data: bytes, bytes_by_mark: Mapping[bytes, int] = _JSON_BYTES) -> None:
    """Raises InvalidInput if the text's values would take too much memory. Marks in strings do not count."""
    if len(data) <= _COUNTED_FROM_BYTES:
        return
    if takes_too_much(data, bytes_by_mark):
        raise InvalidInput(_longest_list(data), f"{TOO_MANY_VALUES}; send fewer at once")


def _longest_list(data: bytes) -> str:
    """Returns the name of the longest list in a body in JSON, judged by the beginning of the body."""
    lists = [*islice(_LIST.finditer(data[: 1 << 20]), 16)]
    ends = [match.start() for match in lists[1:]] + [len(data)]
    longest, name = 0, "body"
    for match, end in zip(lists, ends, strict=False):
        if end - match.end() > longest:
            longest, name = end - match.end(), match[1].decode()
    return name
