"""The .proto files of the public API. `python -m neuronpipe.protos --out DIR` writes them for other languages."""

from pathlib import Path

# With what they import. The files of the stages are internal and not among them.
PUBLIC = (
    "google/rpc/status.proto",
    "neuronpipe/api/v1/inference.proto",
    "neuronpipe/api/v1/models.proto",
    "neuronpipe/api/v1/tasks.proto",
    "neuronpipe/api/v1/traces.proto",
)
# In a wheel the files are beside this one, in a checkout in its folder protos/.
_FOLDERS = (Path(__file__).parent, Path(__file__).parents[3] / "protos")


def write_protos(out: Path) -> None:
    """Writes the files below the folder, which is made where it does not exist. Raises OSError."""
    folder = next(folder for folder in _FOLDERS if (folder / PUBLIC[0]).is_file())
    for name in PUBLIC:
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((folder / name).read_bytes())
