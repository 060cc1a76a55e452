"""compiler/saved_files.py: the reason in an error of a library."""

import pytest

from neuronpipe.compiler.saved_files import reason_of


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("one\ntwo", "one"),
        ("It failed:\n  why", "It failed: why"),
        ("Couldn't trace.\nException:\nsizes differ\nHelp.", "sizes differ"),
        ("Check failed:\nSummary:\n-- No rule for aten::histc", "No rule for aten::histc"),
        ("Failed:\n-- cat with a message:\nAxis -2\nSummary:\n-- No rule for cat", "No rule for cat"),
        ("Exception from src/core.cpp:132:\nException from src/plugin.cpp:59:\nNot found: X\n\n", "Not found: X"),
        (f"Failed:\n-- {'x' * 400}", "x" * 300 + "…"),
        ("", "ValueError"),
    ],
)
def test_of_what_another_library_says_the_reason_is_shown(said: str, shown: str) -> None:
    assert reason_of(ValueError(said)) == shown
