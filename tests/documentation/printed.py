"""Compares what a page shows of a command's output with what the command prints.

A line `…` stands for any lines, and `…` at the end of a line for its rest. Blank lines, the widths of columns and the
bars of waterfalls do not count. Times, sizes, identifiers and counters (`8/138`) may be any. Other numbers are equal
within a tolerance, because the last digits of a score depend on the CPU.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

ELLIPSIS = "…"
# Two per cent, or half a hundredth: reduced dtypes and other instruction sets change the third digit of a score.
_RELATIVE, _ABSOLUTE = 0.02, 0.005
# What differs between two runs → what stands for it in the comparison.
_ANY = (
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    (re.compile(r"\|[█ ]+\|"), "|bar|"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{16,64}\b"), "ID"),
    (re.compile(r"\b\d+/\d+"), "COUNT"),
    (re.compile(r"\b\d+(?:\.\d+)?e[-+]\d+\b"), "SMALL"),
    (re.compile(r"\b[\d,]+(?:\.\d+)? ?(?:ns|µs|ms|s|min|%|[kKMG]?i?B|requests/s|texts/s|tokens/s)(?!\w)"), "TIME"),
    (re.compile(r'(_ns"?: "?)\d+'), r"\1TIME"),
    (re.compile(r'("(?:batch_size|bucket_tokens|padded_tokens)": )\d+'), r"\1COUNT"),  # by how sequences met
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")


class OutputDiffersError(AssertionError):
    """A page shows a line that a command does not print, or leaves one out without `…`."""


def is_same(shown: str, printed: str, *, with_any_numbers: bool = False) -> bool:
    """Whether a line of a page stands for a line of output."""
    if shown.endswith(ELLIPSIS):
        shown = shown.removesuffix(ELLIPSIS)
        printed = " ".join(printed.split()[: len(shown.split())])
    (shown_words, shown_numbers), (words, numbers) = _parts(shown), _parts(printed)
    if shown_words != words:
        return False
    pairs = zip(shown_numbers, numbers, strict=True)
    return with_any_numbers or all(math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) for a, b in pairs)


def _parts(line: str) -> tuple[str, list[float]]:
    """The words of a line with a mark for each number, and the numbers."""
    for pattern, mark in _ANY:
        line = pattern.sub(mark, line)
    return " ".join(_NUMBER.sub("#", line).split()), [float(number) for number in _NUMBER.findall(line)]


def align(shown: Sequence[str], printed: Sequence[str], **options: Any) -> list[str]:
    """The lines that a page shows, each as the command printed it this time. Raises OutputDiffersError.

    `options`: see `is_same`.
    """
    left = [line.rstrip() for line in printed if line.strip()]
    lines, may_skip = list[str](), False
    for line in shown:
        if line.strip() == ELLIPSIS or not line.strip():
            may_skip |= bool(line.strip())
            lines.append(line)
            continue
        place = next((place for place, other in enumerate(left) if is_same(line, other, **options)), None)
        if place is None or (place and not may_skip):
            raise OutputDiffersError(f"the page shows {line!r}, printed is:\n" + "\n".join(left[:20]))
        lines.append(line if line.endswith(ELLIPSIS) else left[place])
        left, may_skip = left[place + 1 :], False
    if left and not may_skip:
        raise OutputDiffersError("the page leaves out, without …:\n" + "\n".join(left[:20]))
    return lines


def parts_of(content: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that are shown as its output."""
    parts, is_continued = list[tuple[str, list[str]]](), False
    for line in content.splitlines():
        if is_continued:
            parts[-1] = (f"{parts[-1][0]}\n{line}", [])
        elif line.startswith("$ "):
            parts.append((line.removeprefix("$ "), []))
        elif parts:
            parts[-1][1].append(line)
        is_continued = (is_continued or line.startswith("$ ")) and line.endswith("\\")
    return parts
