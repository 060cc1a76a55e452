"""The parser of the command line."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """Reports an error in two lines, and suggests the option that was probably meant."""

    _arguments: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As the base class, but an argument that a command does not know is an error of that command."""
        self._arguments = sys.argv[1:] if args is None else args
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Ends with the exit code 2."""
        known = list(self._option_string_actions)
        flags = {argument.partition("=")[0] for argument in self._arguments if argument.startswith("--")}
        misspelt = sorted(flag for flag in flags if not any(option.startswith(flag) for option in known))
        near = {flag: difflib.get_close_matches(flag, known, 1) for flag in misspelt}
        hints = "".join(f"; {flag}: did you mean {found[0]}?" for flag, found in near.items() if found)
        self.exit(2, f"usage: {self.prog} [options]; see {self.prog} --help\n{self.prog}: error: {message}{hints}\n")
