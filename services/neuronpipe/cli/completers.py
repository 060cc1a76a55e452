"""What a shell completes beyond commands and options. argcomplete calls these functions."""

import argparse
from collections.abc import Callable, Iterable

# Somebody waits for it in a shell.
_LIMIT_S = 1.0


def completed_by(action: argparse.Action, completer: Callable[..., Iterable[str]]) -> None:
    """Has the shell complete an option's value by what the function returns."""
    setattr(action, "completer", completer)  # noqa: B010 (argcomplete's own way; argparse knows no such attribute)


def complete_models(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The names of a gateway's models, where the command line has its --target and it answers."""
    from neuronpipe.cli.credentials import tls_files, use_key_of
    from neuronpipe.client import Client
    from neuronpipe.core.errors import NeuronpipeError

    try:
        if parsed_args.api_key_file:
            use_key_of(parsed_args.api_key_file)
        with Client(parsed_args.target, timeout_s=_LIMIT_S, retries=False, tls=tls_files(parsed_args)) as client:
            return sorted({model.name for model in client.list_models()})
    except (AttributeError, TypeError, NeuronpipeError):  # no --target yet, or nobody there
        return []


def complete_at_file(prefix: str, **_: object) -> list[str]:
    """The files for @FILE; texts are not completed."""
    from argcomplete.completers import FilesCompleter

    return [f"@{file}" for file in FilesCompleter()(prefix[1:])] if prefix.startswith("@") else []
