"""`neuronpipe registry`: which versions of the models in a repository are approved, what they are called, and who gets
which.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.bundle import add_trusted_keys
from neuronpipe.cli.promote import add_promotion, promote
from neuronpipe.cli.registry_store import add_store, store_of
from neuronpipe.cli.repository import copied, folder, opened, share, tell_registry
from neuronpipe.cli.terminal import ending_on_sigterm, print_table
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.registry import Operation, RegisteredVersion, Registry, Signed
    from neuronpipe.bundles.repository import Bundle

HELP = "approve versions of models, name them, and distribute requests among them"
EXTRA = "server"

_COLUMNS = ("MODEL", "VERSION", "APPROVAL", "ALIASES", "SHARE", "SHADOW", "AGREEMENT", "DIGEST", "NOTE")
_HISTORY_COLUMNS = ("REVISION", "TIME", "AUTHOR", "MODEL", "CHANGE")
_SHOWN = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neuronpipe registry`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def verb(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text)
        added.set_defaults(verb=run)
        add_store(added)
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
    route = change("route", _route, "distribute the requests that name no version")
    route.add_argument(
        "shares",
        nargs="*",
        metavar="TARGET=SHARE",
        help="an alias or a version, and its share, as in stable=95 canary=5; none: all for stable",
    )
    route.add_argument(
        "--shadow",
        metavar="TARGET=PERCENT",
        help="an alias or a version, and the percentage of these requests that are copied to it and whose results are "
        "dropped, such as canary=10; none: no copies",
    )
    change("load", _load, "serve a model that was unloaded, by the names and shares that it has")
    change("unload", _unload, "serve no version of a model; its names and shares stay")
    promote = change("promote", _promote, "move a version up in steps, and back by itself when a guard fails")
    add_promotion(promote)
    imported = verbs.add_parser("import", help="compile a version of another registry, as a version to approve")
    imported.set_defaults(verb=_import)
    imported.add_argument(
        "--repository", required=True, type=folder, metavar="DIR", help="folder of bundles to write to"
    )
    imported.add_argument("source", choices=["mlflow"], help="the other registry")
    imported.add_argument("registered", metavar="MODEL", help="NAME for its newest version, NAME/VERSION or NAME@ALIAS")
    imported.add_argument("--tracking-uri", default="", metavar="URI", help="MLflow's (default: MLFLOW_TRACKING_URI)")
    imported.add_argument("--name", help="the model's name in requests (default: its name there)")
    imported.add_argument("--task", default="", help="what to compile for (default: found in its configuration)")
    imported.add_argument("--backend", default="openvino", help="openvino (default), neuronx, torch or fake")
    imported.add_argument("--dtype", default="", help="as of `neuronpipe compile`")
    imported.add_argument("--approve", action="store_true", help="approve the version; else it is pending")
    imported.add_argument("--author", help="who makes the change (default: the name of this user)")
    rollback = change("rollback", _rollback, "set aliases and shares back to what they were before their last change")
    rollback.add_argument("--to", type=int, metavar="REVISION", help="to what they were after this revision")


def run(options: argparse.Namespace) -> None:
    """Runs one of the commands. Raises SetupError."""
    options.verb(options)


def _list(options: argparse.Namespace) -> None:
    registry = store_of(options).read()
    if not registry.revision:
        print(f"{options.repository or options.target} has no registry: the newest version of each model is served")
    found = opened(options).bundles() if options.repository else []
    bundles = {bundle.key: bundle for bundle in found}
    present = {(name, str(number)) for name, number in bundles}
    known = {(name, number) for name, model in registry.models.items() for number in model.versions}
    rows = [_row(registry, *key, bundles.get(key)) for key in sorted(bundles.keys() | known)]
    if options.repository:
        rows = [(*row[:-1], row[-1] if row[:2] in present else "its bundle is missing") for row in rows]
    print_table([_COLUMNS, *rows])


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
        share(model, number) if model else "",
        copied(model, number) if model else "",
        _agreement(version),
        digest[:_SHOWN],
        note,
    )


def _agreement(version: "RegisteredVersion | None") -> str:
    found = [one.agreement for one in version.accuracy.values() if one.agreement is not None] if version else []
    return f"{min(found):.4f}" if found else ""


def _show(options: argparse.Namespace) -> None:
    registry = store_of(options).read()
    if options.model not in registry.models:
        raise SetupError(f"model {options.model!r} is not registered; registered are: {', '.join(registry.models)}")
    print(json.dumps(registry.models[options.model].model_dump(mode="json"), indent=2))


def _history(options: argparse.Namespace) -> None:
    changes = [
        (str(one.revision), f"{one.time:%Y-%m-%d %H:%M:%S}", one.author, one.model, one.action)
        for one in store_of(options).read().history
        if options.model in ("", one.model)
    ]
    print_table([_HISTORY_COLUMNS, *changes])


def _approve(options: argparse.Namespace) -> None:
    _decide(options, approves=True)


def _reject(options: argparse.Namespace) -> None:
    _decide(options, approves=False)


def _decide(options: argparse.Namespace, *, approves: bool) -> None:
    decided = store_of(options).decide(options.model, options.version, _signed(options), approves=approves)
    tell_registry(decided, options.model)


def _alias(options: argparse.Namespace) -> None:
    if not (options.version == "none" or options.version.isdecimal()):
        raise SetupError(f"VERSION {options.version!r}: must be a whole number, or none")
    version = None if options.version == "none" else int(options.version)
    _change(options, lambda registry: registry.alias(options.model, options.alias, version, _signed(options)))


def _load(options: argparse.Namespace) -> None:
    _change(options, lambda registry: registry.load(options.model, _signed(options)))


def _unload(options: argparse.Namespace) -> None:
    _change(options, lambda registry: registry.unload(options.model, _signed(options)))


def _import(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.registry import Signed
    from neuronpipe.bundles.sources import FolderRepository
    from neuronpipe.compiler import CompileRequest, compile_bundle
    from neuronpipe.compiler.mlflow import fetch_mlflow_model

    name = options.name or re.split("[/@]", options.registered)[0]
    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="neuronpipe-") as scratch:
        found = fetch_mlflow_model(options.registered, options.tracking_uri, Path(scratch))
        request = CompileRequest(
            source=str(found.folder),
            task=options.task.replace("-", "_"),
            repository=options.repository,
            name=name,
            backend=options.backend,
            dtype=options.dtype,
        )
        bundle = compile_bundle(request, lambda line: print(line, file=sys.stderr, flush=True))
    note = f"imported from {found.origin}"
    signed = Signed(options.author, note) if options.author else Signed(note=note)

    def decide(registry: "Registry") -> "Registry":
        return registry.approve(bundle, signed) if options.approve else registry.register(bundle, signed)

    tell_registry(FolderRepository(options.repository).change_registry(decide, signed, bundle.key), name)


def _route(options: argparse.Namespace) -> None:
    if not options.shares and options.shadow is None:
        raise SetupError("TARGET=SHARE, or --shadow, is missing; none: all for stable")
    shares = {} if options.shares == ["none"] else dict(map(_target_and_share, options.shares))
    shadow = ("", 0.0) if options.shadow == "none" else _target_and_share(options.shadow) if options.shadow else None

    def change(registry: "Registry") -> "Registry":
        if options.shares:
            registry = registry.reroute(options.model, shares, _signed(options))
        return registry.copy_to(options.model, *shadow, _signed(options)) if shadow else registry

    _change(options, change)


def _target_and_share(text: str) -> tuple[str, float]:
    target, separator, share = text.partition("=")
    try:
        if target and separator:
            return target, float(share)
    except ValueError:
        pass
    raise SetupError(f"TARGET=SHARE {text!r}: must be an alias or a version and a number, as in canary=5")


def _promote(options: argparse.Namespace) -> None:
    store = store_of(options)
    promote(options, store.read(), store.change, _signed(options))


def _rollback(options: argparse.Namespace) -> None:
    _change(options, lambda registry: registry.roll_back(options.model, options.to, _signed(options)))


def _change(options: argparse.Namespace, operation: "Operation") -> None:
    tell_registry(store_of(options).change(operation, _signed(options)), options.model)


def _signed(options: argparse.Namespace) -> "Signed":
    from neuronpipe.bundles.registry import Signed

    return Signed(options.author, options.note) if options.author else Signed(note=options.note)
