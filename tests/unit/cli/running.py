"""Commands, run in the process of the tests."""

import pytest

from neuronpipe import cli


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that ends by itself."""
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    return code, *capsys.readouterr()
