"""The repository of a command: its options, and what is said of its registry."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuronpipe.bundles.registry import RegisteredModel, Registry
    from neuronpipe.bundles.sources import Repository


def add_repository(
    parser: argparse.ArgumentParser, instead_of: "argparse._MutuallyExclusiveGroup | None" = None
) -> None:
    """Adds --repository and --endpoint. `instead_of`: the group of what may be given in place of a repository."""
    (instead_of or parser).add_argument(
        "--repository", required=not instead_of, metavar="DIR", help="the folder of bundles, or s3://BUCKET/PREFIX"
    )
    parser.add_argument(
        "--endpoint",
        default="",
        metavar="URL",
        help="for s3://: the object store's (default: AWS_ENDPOINT_URL, or AWS)",
    )


def folder(text: str) -> Path:
    """The type of an option that takes a folder, and no bucket."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a folder; `neuronpipe bundle push` uploads its bundles to s3://BUCKET/PREFIX"
        )
    return Path(text)


def opened(options: argparse.Namespace) -> "Repository":
    """The repository of the options. Raises SetupError."""
    from neuronpipe.bundles.sources import open_repository

    return open_repository(options.repository, options.endpoint)


def tell_registry(registry: "Registry", name: str) -> None:
    """Says what the model's requests get from now on."""
    model, last = registry.models[name], registry.history[-1]
    shares = ", ".join(f"version {number} {share(model, number)}" for number, _ in model.declared.shares) or "none"
    aliases = ", ".join(f"{alias} {number}" for alias, number in model.aliases.items()) or "none"
    print(f"revision {registry.revision}: {name}: {last.action}")
    shadow = model.declared.shadow
    copies = f"; copies: version {shadow[0]} {copied(model, shadow[0])}" if shadow else ""
    print(f"requests without a version: {shares}; aliases: {aliases}{copies}")


def share(model: "RegisteredModel", number: int) -> str:
    """The share of a version, as a percentage; empty where it has none, `unloaded` where the model is."""
    if model.is_unloaded:
        return "unloaded"
    shares = dict(model.declared.shares)
    return f"{100 * shares[number] / sum(shares.values()):.3g} %" if number in shares else ""


def copied(model: "RegisteredModel", number: int) -> str:
    """The share of the requests that are copied to a version, as a percentage; empty where none are."""
    shadow = model.declared.shadow
    return f"{100 * shadow[1]:.3g} %" if shadow and shadow[0] == number else ""
