"""`neuronpipe models`: lists the models of a gateway."""

import argparse
import sys
from typing import TYPE_CHECKING

from neuronpipe.cli.request import add_target, connected, tasks_of
from neuronpipe.cli.terminal import print_table

if TYPE_CHECKING:
    from neuronpipe.api.v1.models_pb2 import Model

HELP = "list the models that a gateway serves"
EXTRA = ""

# A star marks the version that requests without a version get, or most of them.
_COLUMNS = ("MODEL", "VERSION", "TASKS", "TOKENS", "BACK END", "DTYPE", "ARCHITECTURE", "STATE", "ALIASES", "SHARE")
# The state of its executors: shapes ready / shapes to prepare, and static graphs of single texts with their memory.
_PREPARED = ("SHAPES", "GRAPHS")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_target(parser)


def run(options: argparse.Namespace) -> None:
    """Prints a line for each version of each model, and the problem of any. Raises the errors of the call."""
    with connected(options) as client:
        models = client.list_models()
    print_table([(*_COLUMNS, *_PREPARED), *map(_row, models)])
    for model in models:
        if model.problem:
            print(f"{model.name} version {model.version}: {model.problem}", file=sys.stderr)


def _state(model: "Model") -> str:
    from neuronpipe.api.v1.models_pb2 import VersionState

    state = VersionState.Name(model.state).removeprefix("VERSION_STATE_").lower() if model.state else ""
    return f"{state} {model.fetched:.0%}" if model.fetched else state


def _row(model: "Model") -> tuple[str, ...]:
    return (
        model.name,
        model.version + ("*" if model.is_default else ""),
        ",".join(task.replace("_", "-") for task in tasks_of(model)),
        str(model.max_tokens),
        ",".join(model.backends),
        model.dtype,
        model.architecture,
        _state(model),
        ",".join(model.aliases),
        f"{100 * model.share:.3g} %",
        f"{model.shapes_ready}/{model.shapes}" if model.shapes else "",
        f"{model.lone_graphs}, {model.lone_graph_bytes / 1e6:.0f} MB" if model.lone_graphs else "",
    )
