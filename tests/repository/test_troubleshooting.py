"""docs/troubleshooting.md quotes messages that the code still has.

A row of a table whose first cell is a quotation (`…`) is checked: its parts between the ellipses must occur, in that
order, in one text of the sources. Messages of other programs have their name before the quotation. No message of the
sources names a setting that was removed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronpipe.core.errors import CUT
from neuronpipe.core.removed_settings import REMOVED

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_QUOTED = re.findall(r"^\| `([^`]+)` \|", _PAGE, re.MULTILINE)
# Stands for a value that an f-string puts in.
_VALUE = "\0"
# Ends each text.
_END = "\1"


def _python_texts() -> Iterator[str]:
    for path in (_ROOT / "services").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(_text_of(part) for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield node.value


def _text_of(part: ast.expr) -> str:
    if isinstance(part, ast.FormattedValue):
        return CUT if ast.unparse(part.value) == "CUT" else _VALUE  # the advice that several messages end with
    assert isinstance(part, ast.Constant)
    return str(part.value)


@pytest.fixture(scope="module")
def texts() -> str:
    """All of them in one, which is searched in a hundredth of the time."""
    # The Makefile's messages hold values of the shell.
    makefile = re.sub(r"\$\$\w+", _VALUE, (_ROOT / "docker" / "docker.mk").read_text(encoding="utf-8"))
    return "".join(f"{text}{_END}" for text in {*_python_texts(), makefile})


def _is_in(quoted: str, texts: str) -> bool:
    parts = quoted.split("…")
    pattern, longest = re.compile(".*".join(map(re.escape, parts))), max(parts, key=len)
    begin = -1
    while (begin := texts.find(longest, begin + 1)) >= 0:
        if pattern.search(texts, texts.rfind(_END, 0, begin) + 1, texts.find(_END, begin)):
            return True
    return False


def test_the_page_quotes_messages() -> None:
    assert len(_QUOTED) > 100


@pytest.mark.parametrize("quoted", _QUOTED)
def test_a_quoted_message_is_one_of_the_sources(quoted: str, texts: str) -> None:
    assert len(re.sub(r"[\W\d]", "", quoted)) >= 7, "too short to be found by it"
    assert _is_in(quoted, texts)


def test_a_message_that_no_source_has_is_found_out(texts: str) -> None:
    assert not _is_in("the … service cannot be teached", texts)
    assert _is_in("the … service cannot be reached", texts)


_NAMES_REMOVED = re.compile(rf"(?:'s |\()(?:{'|'.join(REMOVED)})\b[^{_END}]*")


def test_no_message_names_a_setting_that_was_removed(texts: str) -> None:
    assert _NAMES_REMOVED.findall(texts) == []
    for message in ("the limit is 3 (the gateway's max_batch_items)", "the limit is 3 (max_message_bytes)"):
        assert _NAMES_REMOVED.search(message)
