"""Reads the JSON files of a model, and turns errors of libraries about a model into errors for a user."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError, first_line, shortened, text_lines


def reason_of(error: BaseException) -> str:
    """Returns the reason in an exception of a library that reads or converts models, as one line."""
    lines = text_lines(error)
    # OpenVINO lists reasons in a summary; a reason that ends in a colon only introduces the problem of one operation.
    listed = next((line for line in lines if line.startswith("-- ") and not line.endswith(":")), "")
    raised = next((after for line, after in pairwise(lines) if line == "Exception:"), "")  # found by its tracer
    if lines and lines[0].startswith("Exception from "):  # lines of OpenVINO's source code follow
        raised = lines[-1]
    reason = listed.removeprefix("-- ") or raised
    return shortened(reason) if reason else first_line(error)


@contextmanager
def refusing(problem: str, *, advice: str = "", why: Callable[[Exception], str] | None = reason_of) -> Iterator[None]:
    """Turns every error in the block into a SetupError of the problem, the reason by `why` and the advice.

    A SetupError passes as it is.
    """
    try:
        yield
    except SetupError:
        raise
    except Exception as error:
        reason = f": {why(error)}" if why else ""
        raise SetupError(f"{problem}{reason}{advice}") from error


def cause_of(error: Exception) -> str:
    """Returns the reason in an error's cause, or in the error itself if it has no cause."""
    return reason_of(error.__cause__ or error)


def read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "\\ud" in text.lower():  # half of a character, which no file of ours could contain
            json.dumps(content, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise SetupError(f"{path}: cannot be read as JSON: {reason_of(error)}; get the file again") from error
    return content


def read_object(path: Path, *, may_lack: bool = False) -> dict[str, Any]:
    """Reads an object of settings. `may_lack`: a missing file is an empty object. Raises SetupError."""
    content = {} if may_lack and not path.is_file() else read_json(path)
    if not isinstance(content, dict):
        raise SetupError(f"{path}: holds {type(content).__name__}, not an object of settings; get the file again")
    return content
