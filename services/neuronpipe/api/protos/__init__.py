"""Finds the .proto files of the public API. `python -m neuronpipe.api.protos --out DIR` writes them to a folder."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# The public files, the files that they import, and the details of errors. The files of the stages are internal.
PUBLIC = (
    "google/api/annotations.proto",
    "google/api/client.proto",
    "google/api/field_behavior.proto",
    "google/api/http.proto",
    "google/api/launch_stage.proto",
    "google/longrunning/operations.proto",
    "google/rpc/error_details.proto",
    "google/rpc/status.proto",
    "neuronpipe/api/v1/inference.proto",
    "neuronpipe/api/v1/jobs.proto",
    "neuronpipe/api/v1/models.proto",
    "neuronpipe/api/v1/tasks.proto",
    "neuronpipe/api/v1/registry.proto",
    "neuronpipe/api/v1/traces.proto",
)
# A wheel has the files beside this file, a checkout has them in its folder protos/.
_FOLDERS = (Path(__file__).parent, Path(__file__).parents[4] / "protos")


def write_protos(out: Path) -> None:
    """Writes the files below the folder `out`, and creates the folder if it is missing. Raises OSError."""
    for name in PUBLIC:
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((_folder() / name).read_bytes())


@cache
def field_comments() -> Mapping[str, str]:
    """Returns the comment of each field of the public messages, by `Message.field`."""
    comments: dict[str, str] = {}
    for name in PUBLIC:
        message, lines = "", []
        for line in (_folder() / name).read_text(encoding="utf-8").splitlines():
            if message_start := re.match(r"message (\w+)", line):
                message = message_start[1]
            if comment := re.match(r" *// ?(.*)", line):
                lines.append(comment[1])
                continue
            if field := re.match(r" +(?:repeated |optional )?[\w.]+ (\w+) = \d+;", line):
                comments[f"{message}.{field[1]}"] = " ".join(lines)
            lines = []
    return comments


def _folder() -> Path:
    return next(folder for folder in _FOLDERS if (folder / PUBLIC[0]).is_file())
