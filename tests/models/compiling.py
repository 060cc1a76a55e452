"""Compiles models of tests, in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import CompileRequest, compile_bundle


def compile_model(
    source: str | Path,
    repository: Path,
    task: str = "",
    *,
    name: str = "m",
    report: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> Bundle:
    """The bundle. `options`: fields of CompileRequest."""
    return compile_bundle(CompileRequest(str(source), task, repository, name, **options), report)
