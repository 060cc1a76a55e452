"""How rows are read and written: a file for each format, behind base.py."""

import importlib
from pathlib import PurePosixPath

from neuronpipe.bulk.transform.formats.base import Format
from neuronpipe.core.errors import SetupError

# Format → endings of its files.
ENDINGS = {"jsonl": (".jsonl", ".ndjson"), "csv": (".csv",), "parquet": (".parquet", ".pq")}
# Ending → the name of the compression.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_MODULES = {"jsonl": "json_lines", "openai": "json_lines", "csv": "comma_separated", "parquet": "parquet"}


def find_format(name: str) -> Format:
    """A format by its name; its libraries are imported now. Raises ModuleNotFoundError."""
    format: Format = importlib.import_module(f"neuronpipe.bulk.transform.formats.{_MODULES[name]}").FORMAT
    return format


def format_of(file: str) -> str:
    """The name of the format that a file's name says. Raises SetupError."""
    path = PurePosixPath(file)
    ending = (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix
    for name, endings in ENDINGS.items():
        if ending in endings:
            return name
    known = " ".join(ending for endings in ENDINGS.values() for ending in endings)
    raise SetupError(
        f"{file}: its name does not say its format; give --input-format, or one of the endings {known}, also with "
        f"{' or '.join(COMPRESSIONS)} behind"
    )
