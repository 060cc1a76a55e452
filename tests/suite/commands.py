"""`neuronpipe` as people run it, in a process of its own, until it ends."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO

_LIMIT_S = 100.0


def start_command(
    words: Sequence[str], files: Sequence[IO[str]], variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Runs a command. `files`: its input, output and errors. In tests, tests/suite/forked.py takes its place."""
    given, out, errors = files
    command = [sys.executable, "-m", "neuronpipe", *words]
    return subprocess.Popen(command, stdin=given, stdout=out, stderr=errors, env=variables, start_new_session=True)


def run(
    *words: str, text: str = "", environment: Mapping[str, str] | None = None, limit_s: float = _LIMIT_S
) -> "subprocess.CompletedProcess[str]":
    """Runs a command until it ends. `text`: its input. `environment`: variables in addition to the tests' variables.

    Raises TimeoutExpired for a command that does not end, and ends it.
    """
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        given.write(text)
        given.seek(0)
        process = start_command(words, (given, out, errors), {**os.environ, **(environment or {})})
        try:
            code = process.wait(limit_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), errors.read())


def output(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command, which must succeed."""
    ended = run(*words, environment=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
