"""A model over several cores: cut between layers into parts, each on a core of its own, through which batches flow."""

from collections.abc import Sequence

from neuronpipe.core.errors import SetupError

# The input of every part except the first, and the only output of every part except the last: the last layer's output.
HIDDEN = "hidden"
# The quantities that can be balanced among parts.
BALANCES = ("time", "memory")


def check_parts(name: str, parts: int, cores: int, *, leaves_none: bool) -> None:
    """Raises SetupError if there are fewer cores than parts, or if cores are left over and none may be."""
    if cores < parts:
        raise SetupError(
            f"model {name!r}: compiled in {parts} parts, each for a core of its own (--pipeline-cores), and there are "
            f"{cores} cores"
        )
    if leaves_none and cores % parts:
        raise SetupError(
            f"cores: {cores}, and the model {name!r} is in {parts} parts, each on a core of its own; give a multiple "
            f"of {parts}"
        )


def part_names(name: str, parts: int) -> Sequence[str]:
    """Returns the names of the files of a model's parts, in order."""
    return [f"{name}-{number}" for number in range(1, parts + 1)] if parts > 1 else [name]
