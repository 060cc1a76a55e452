"""Programs that only write down how they are called, in front of the path."""

import shlex
from pathlib import Path

import pytest


class Programs:
    """`answers`: what a program prints for a call that holds a text."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        patch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def add(self, name: str, **answers: str) -> None:
        cases = "".join(f"*{shlex.quote(text)}*) echo {shlex.quote(said)} ;;\n" for text, said in answers.items())
        program = self._folder / name
        program.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {self._folder}/calls\n'
            f'case "$*" in\n{cases}*fail*) echo broken >&2; exit 3 ;;\nesac\n'
        )
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """Each call, with the program's name."""
        file = self._folder / "calls"
        return file.read_text().splitlines() if file.exists() else []
