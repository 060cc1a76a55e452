"""A model over several cores: cut between layers into parts, each on a core of its own, and batches flow through."""

from collections.abc import Sequence

# The input of every part but the first, and the only output of every part but the last: what its last layer computed.
HIDDEN = "hidden"


def part_names(name: str, parts: int) -> Sequence[str]:
    """The names of the files of a model's parts, in order."""
    return [f"{name}-{number}" for number in range(1, parts + 1)] if parts > 1 else [name]
