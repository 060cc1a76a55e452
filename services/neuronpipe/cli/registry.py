"""`neuronpipe registry`: which versions of the models in a repository are approved, what they are called, and who gets
which.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.bundle import add_trusted_keys
from neuronpipe.cli.table import print_table
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.registry import Operation, RegisteredModel, RegisteredVersion, Registry, Signed
    from neuronpipe.bundles.repository import Bundle

HELP = "approve versions of models, name them, and share out requests among them"
EXTRA = "server"

_COLUMNS = ("MODEL", "VERSION", "APPROVAL", "ALIASES", "SHARE", "AGREEMENT", "DIGEST", "NOTE")
_HISTORY_COLUMNS = ("REVISION", "TIME", "AUTHOR", "MODEL", "CHANGE")
_SHOWN = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neuronpipe registry`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def verb(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text)
        added.set_defaults(verb=run)
        added.add_argument("--repository", required=True, type=Path, metavar="DIR", help="the folder of bundles")
        return added

    def change(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = verb(name, run, text)
        added.add_argument("--author", help="who makes the change (default: the name of this user)")
        added.add_argument("--note", default="", help="why, for the history")
        added.add_argument("model", metavar="MODEL", help="the model's name")
        return added

    verb("list", _list, "list every version of every model")
    verb("show", _show, "print what is registered of a model, as JSON").add_argument(
        "model", metavar="MODEL", help="the model's name"
    )
    verb("history", _history, "list every change, the newest last").add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="of this model only"
    )
    approve = change("approve", _approve, "allow a version to be served; a model's first one becomes stable")
    add_trusted_keys(approve)
    reject = change("reject", _reject, "forbid a version, and take its aliases and shares away")
    for decision in (approve, reject):
        decision.add_argument("version", type=int, metavar="VERSION", help="the version's number")
    alias = change("alias", _alias, "give a version a name, or the name another version")
    alias.add_argument("alias", metavar="ALIAS", help="the name, such as stable or canary")
    alias.add_argument("version", metavar="VERSION", help="the version's number; none: remove the alias")
    route = change("route", _route, "share out the requests that name no version")
    route.add_argument(
        "shares",
        nargs="+",
        metavar="TARGET=SHARE",
        help="an alias or a version, and its share, as in stable=95 canary=5; none: all for stable",
    )
    rollback = change("rollback", _rollback, "set aliases and shares back to what they were before their last change")
    rollback.add_argument("--to", type=int, metavar="REVISION", help="to what they were after this revision")


def run(options: argparse.Namespace) -> None:
    """Runs one of the commands. Raises SetupError."""
    options.verb(options)


def _list(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.registry_file import read_registry
    from neuronpipe.bundles.repository import read_repository

    registry = read_registry(options.repository)
    if not registry.revision:
        print(f"{options.repository} has no registry: the newest version of each model is served")
    bundles = {bundle.key: bundle for bundle in read_repository(options.repository)}
    known = {(name, number) for name, model in registry.models.items() for number in model.versions}
    print_table([_COLUMNS, *(_row(registry, *key, bundles.get(key)) for key in sorted(bundles.keys() | known))])


def _row(registry: "Registry", name: str, number: int, bundle: "Bundle | None") -> tuple[str, ...]:
    model = registry.models.get(name)
    version = model.versions.get(number) if model else None
    digest = version.digest if version else bundle.digest if bundle else ""
    note = version.approval.note if version else ""
    return (
        name,
        str(number),
        (version.approval.state if version else "pending") if registry.revision else "",
        ",".join(sorted(alias for alias, one in model.aliases.items() if one == number)) if model else "",
        _share(model, number) if model else "",
        _agreement(version),
        digest[:_SHOWN],
        note if bundle else "its bundle is missing",
    )


def _share(model: "RegisteredModel", number: int) -> str:
    shares = dict(model.declared.shares)
    return f"{100 * shares[number] / sum(shares.values()):.3g} %" if number in shares else ""


def _agreement(version: "RegisteredVersion | None") -> str:
    found = [one.agreement for one in version.accuracy.values() if one.agreement is not None] if version else []
    return f"{min(found):.4f}" if found else ""


def _show(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.registry_file import read_registry

    registry = read_registry(options.repository)
    if options.model not in registry.models:
        raise SetupError(f"model {options.model!r} is not registered; registered are: {', '.join(registry.models)}")
    print(json.dumps(registry.models[options.model].model_dump(mode="json"), indent=2))


def _history(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.registry_file import read_registry

    changes = [
        (str(one.revision), f"{one.time:%Y-%m-%d %H:%M:%S}", one.author, one.model, one.action)
        for one in read_registry(options.repository).history
        if options.model in ("", one.model)
    ]
    print_table([_HISTORY_COLUMNS, *changes])


def _approve(options: argparse.Namespace) -> None:
    bundle = _bundle(options)
    bundle.files.check()
    _change(options, lambda registry: registry.approve(bundle, _signed(options)))


def _reject(options: argparse.Namespace) -> None:
    bundle = _bundle(options)
    _change(options, lambda registry: registry.reject(bundle, _signed(options)))


def _alias(options: argparse.Namespace) -> None:
    if not (options.version == "none" or options.version.isdecimal()):
        raise SetupError(f"VERSION {options.version!r}: must be a whole number, or none")
    version = None if options.version == "none" else int(options.version)
    _change(options, lambda registry: registry.alias(options.model, options.alias, version, _signed(options)))


def _route(options: argparse.Namespace) -> None:
    shares = {} if options.shares == ["none"] else dict(map(_target_and_share, options.shares))
    _change(options, lambda registry: registry.reroute(options.model, shares, _signed(options)))


def _target_and_share(text: str) -> tuple[str, float]:
    target, separator, share = text.partition("=")
    try:
        if target and separator:
            return target, float(share)
    except ValueError:
        pass
    raise SetupError(f"TARGET=SHARE {text!r}: must be an alias or a version and a number, as in canary=5")


def _rollback(options: argparse.Namespace) -> None:
    _change(options, lambda registry: registry.roll_back(options.model, options.to, _signed(options)))


def _change(options: argparse.Namespace, operation: "Operation") -> None:
    from neuronpipe.bundles.registry_file import change_registry

    _tell(change_registry(options.repository, operation, _signed(options)), options.model)


def _tell(registry: "Registry", name: str) -> None:
    """Says what the model's requests get from now on."""
    model, last = registry.models[name], registry.history[-1]
    shares = ", ".join(f"version {number} {_share(model, number)}" for number, _ in model.declared.shares) or "none"
    aliases = ", ".join(f"{alias} {number}" for alias, number in model.aliases.items()) or "none"
    print(f"revision {registry.revision}: {name}: {last.action}")
    print(f"requests without a version: {shares}; aliases: {aliases}")


def _bundle(options: argparse.Namespace) -> "Bundle":
    from neuronpipe.bundles.repository import read_bundle, read_trusted_keys

    folder = options.repository / options.model / str(options.version)
    if not folder.is_dir():
        raise SetupError(f"{folder}: no such bundle; `neuronpipe registry list` lists those that are there")
    return read_bundle(folder, read_trusted_keys(getattr(options, "trusted_keys", None)))


def _signed(options: argparse.Namespace) -> "Signed":
    from neuronpipe.bundles.registry import Signed

    return Signed(options.author, options.note) if options.author else Signed(note=options.note)
