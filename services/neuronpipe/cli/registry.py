"""`neuronpipe registry`: approves versions of models, names them, and distributes requests among them."""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from neuronpipe.cli.bundle import add_trusted_keys
from neuronpipe.cli.repository import GatewayRegistry, add_store, copied, folder, opened, share, store_of, tell_registry
from neuronpipe.cli.request import tls_files
from neuronpipe.cli.terminal import ending_on_sigterm, made, option, print_table, report, seconds, subcommand
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.registry import Operation, RegisteredVersion, Registry, Signed
    from neuronpipe.bundles.repository import Bundle
    from neuronpipe.measure.promotion import GatewayNumbers

HELP = "approve versions of models, name them, and distribute requests among them"
EXTRA = "server"

_COLUMNS = ("MODEL", "VERSION", "APPROVAL", "ALIASES", "SHARE", "SHADOW", "AGREEMENT", "DIGEST", "NOTE")
_HISTORY_COLUMNS = ("REVISION", "TIME", "AUTHOR", "MODEL", "CHANGE")
_SHOWN = 12
# The times between two reads of the metrics: front processes report once a second.
_LOOKS, _SHORTEST_LOOK_S, _LONGEST_LOOK_S = 20, 1.0, 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def verb(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = subcommand(verbs, name, run, text)
        add_store(added)
        return added

    def change(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        added = verb(name, run, text)
        option(added, "--author AUTHOR", "author of the change (default: the name of this user)")
        option(added, "--note NOTE", "reason of the change, for the history", "")
        option(added, "model MODEL", "the model's name")
        return added

    verb("list", _list, "list every version of every model")
    option(verb("show", _show, "print a model's entry in the registry, as JSON"), "model MODEL", "the model's name")
    option(
        verb("history", _history, "list every change, the newest last"),
        "model MODEL",
        "list only this model's changes",
        "",
        nargs="?",
    )
    approve = change(
        "approve", partial(_decide, approves=True), "allow a version to be served; a model's first one becomes stable"
    )
    add_trusted_keys(approve)
    reject = change("reject", partial(_decide, approves=False), "forbid a version, and remove its aliases and shares")
    for decision in (approve, reject):
        option(decision, "version VERSION", "the version's number", int)
    alias = change("alias", _alias, "give a version a name, or the name another version")
    option(alias, "alias ALIAS", "the name, such as stable or canary")
    option(alias, "version VERSION", "the version's number; none: remove the alias")
    route = change("route", _route, "distribute the requests that name no version")
    option(
        route,
        "shares TARGET=SHARE",
        "an alias or a version, and its share, as in stable=95 canary=5; none: all for stable",
        nargs="*",
    )
    option(
        route,
        "--shadow TARGET=PERCENT",
        "an alias or a version, and the percentage of these requests that are copied to it and whose results are "
        "dropped, such as canary=10; none: no copies",
    )
    change("load", _load, "serve a model that was unloaded, by the names and shares that it has")
    change("unload", _unload, "serve no version of a model; its names and shares stay")
    promote = change("promote", _promote, "move a version up in steps, and back by itself when a guard fails")
    _add_promotion(promote)
    imported = subcommand(verbs, "import", _import, "compile a version of another registry, as a version to approve")
    option(imported, "--repository DIR", "folder of bundles to write to", folder, required=True)
    option(imported, "source", "the other registry", choices=["mlflow"])
    option(imported, "registered MODEL", "NAME for its newest version, NAME/VERSION or NAME@ALIAS")
    option(imported, "--tracking-uri URI", "MLflow's (default: MLFLOW_TRACKING_URI)", "")
    option(imported, "--name NAME", "the model's name in requests (default: its name there)")
    option(imported, "--task TASK", "task to compile for (default: found in its configuration)", "")
    option(imported, "--backend BACKEND", "openvino (default), neuronx, torch or fake", "openvino")
    option(imported, "--dtype DTYPE", "dtype, see `neuronpipe compile`", "")
    option(imported, "--approve", "approve the version; otherwise it is pending")
    option(imported, "--author AUTHOR", "author of the change (default: the name of this user)")
    rollback = change("rollback", _rollback, "set aliases and shares back to their state before the last change")
    option(rollback, "--to REVISION", "set them back to their state after this revision", int)


def _list(options: argparse.Namespace) -> None:
    registry = store_of(options).read_registry()
    if not registry.revision:
        print(f"{options.repository or options.target} has no registry: the newest version of each model is served")
    present_bundles = opened(options).bundles() if options.repository else []
    bundles = {bundle.key: bundle for bundle in present_bundles}
    present = {(name, str(number)) for name, number in bundles}
    registered = {(name, number) for name, model in registry.models.items() for number in model.versions}
    rows = [_row(registry, *key, bundles.get(key)) for key in sorted(bundles.keys() | registered)]
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
        ",".join(sorted(alias for alias, version_number in model.aliases.items() if version_number == number))
        if model
        else "",
        share(model, number) if model else "",
        copied(model, number) if model else "",
        _agreement(version),
        digest[:_SHOWN],
        note,
    )


def _agreement(version: "RegisteredVersion | None") -> str:
    agreements = (
        [accuracy.agreement for accuracy in version.accuracy.values() if accuracy.agreement is not None]
        if version
        else []
    )
    return f"{min(agreements):.4f}" if agreements else ""


def _show(options: argparse.Namespace) -> None:
    registry = store_of(options).read_registry()
    if options.model not in registry.models:
        raise SetupError(f"model {options.model!r} is not registered; registered are: {', '.join(registry.models)}")
    print(json.dumps(registry.models[options.model].model_dump(mode="json"), indent=2))


def _history(options: argparse.Namespace) -> None:
    changes = [
        (str(change.revision), f"{change.time:%Y-%m-%d %H:%M:%S}", change.author, change.model, change.action)
        for change in store_of(options).read_registry().history
        if options.model in ("", change.model)
    ]
    print_table([_HISTORY_COLUMNS, *changes])


def _decide(options: argparse.Namespace, *, approves: bool) -> None:
    from neuronpipe.bundles.sources import approve_version, reject_version
    from neuronpipe.core.items import ModelKey

    store, signed = store_of(options), _signed(options)
    if isinstance(store, GatewayRegistry):
        decided = store.decide(options.model, options.version, signed, approves=approves)
    else:
        key = ModelKey(options.model, options.version)
        if approves:
            operation = approve_version(store, key, options.trusted_keys, signed)
        else:
            operation = reject_version(store, key, signed)
        decided = store.change_registry(operation, signed)
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
    from neuronpipe.bundles.folder_repository import FolderRepository
    from neuronpipe.bundles.registry import Signed
    from neuronpipe.compiler import CompileRequest, compile_bundle
    from neuronpipe.compiler.mlflow import fetch_mlflow_model

    name = options.name or re.split("[/@]", options.registered)[0]
    with ending_on_sigterm(), tempfile.TemporaryDirectory(prefix="neuronpipe-") as scratch:
        folder, origin = fetch_mlflow_model(options.registered, options.tracking_uri, Path(scratch))
        task = options.task.replace("-", "_")
        request = made(CompileRequest, options, source=str(folder), task=task, name=name)
        bundle = compile_bundle(request, report)
    note = f"imported from {origin}"
    signed = Signed(options.author, note) if options.author else Signed(note=note)

    def decide(registry: "Registry") -> "Registry":
        return registry.approve(bundle, signed) if options.approve else registry.register(bundle, signed)

    tell_registry(FolderRepository(options.repository).change_registry(decide, signed, bundle.key), name)


def _route(options: argparse.Namespace) -> None:
    if not options.shares and options.shadow is None:
        raise SetupError("TARGET=SHARE, or --shadow, is missing; none: all for stable")
    pairs = [] if options.shares == ["none"] else [*map(_target_and_share, options.shares)]
    if len(shares := dict(pairs)) < len(pairs):
        raise SetupError(f"TARGET=SHARE {' '.join(options.shares)}: names a target twice")
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


def _add_promotion(parser: argparse.ArgumentParser) -> None:
    option(parser, "version TARGET", "the alias or version to promote, as canary")
    option(
        parser,
        "--guard NAME=LIMIT",
        "p99=1.2: answers take at most 1.2 times as long as stable's; p99=300ms: at most that long with either "
        "version; errors=0.1%%: at most that share of requests more fails; agreement=0.99: copies of requests agree "
        "so far; can be repeated",
        action="append",
        required=True,
    )
    option(
        parser,
        "--metrics URL",
        "the page of the metrics of a gateway, as http://127.0.0.1:9464/metrics; repeated for each gateway",
        action="append",
        required=True,
    )
    option(parser, "--steps PERCENT,…", "percentages of the requests (default: 5,25,50,100)", "5,25,50,100")
    option(parser, "--for TIME", "duration of each step (default: 10m)", seconds, default="10m", dest="step_s")
    option(parser, "--requests N", "a step continues until each version has answered N requests (default: 100)", 100)


def _promote(options: argparse.Namespace) -> None:
    """Promotes a version, or exits with 1 if a guard failed. Raises SetupError."""
    from neuronpipe.measure.promotion import INSTRUMENTS, GuardFailed, Promotion, PromotionGuard, PromotionPlan
    from neuronpipe.platform.telemetry.prometheus import scrape
    from neuronpipe.platform.tls import watched_tls
    from neuronpipe.rpc.client import key_metadata

    store = store_of(options)
    registry = store.read_registry()
    if options.requests < 1:
        raise SetupError("--requests: must be 1 or more")
    plan = PromotionPlan(
        model=options.model,
        target=options.version,
        guards=[PromotionGuard.parse(text) for text in options.guard],
        steps=_percentages(options.steps),
        step_s=options.step_s,
        least=options.requests,
        look_s=min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, options.step_s / _LOOKS)),
    )
    plain = [urlsplit(url).netloc for url in options.metrics if not url.startswith("https:")]
    files, key = tls_files(options), key_metadata(target=",".join(plain), is_encrypted=not plain)
    tls = watched_tls(files, "client").value.context if files else None

    def read() -> "list[GatewayNumbers]":
        return [scrape(url, INSTRUMENTS, key, tls) for url in options.metrics]

    read()  # before anything changes
    run = Promotion(plan, store.change_registry, read, lambda line: print(line, flush=True), _signed(options))
    with ending_on_sigterm():
        try:
            run.run(registry)
        except GuardFailed as failure:
            print(f"neuronpipe: {options.version} is moved back: {failure}", file=sys.stderr)
            sys.exit(1)


def _percentages(text: str) -> list[float]:
    try:
        return [float(percentage) for percentage in text.split(",")]
    except ValueError:
        raise SetupError(f"--steps {text!r}: must be percentages with commas, as in 5,25,50,100") from None


def _rollback(options: argparse.Namespace) -> None:
    _change(options, lambda registry: registry.roll_back(options.model, options.to, _signed(options)))


def _change(options: argparse.Namespace, operation: "Operation") -> None:
    tell_registry(store_of(options).change_registry(operation, _signed(options)), options.model)


def _signed(options: argparse.Namespace) -> "Signed":
    from neuronpipe.bundles.registry import Signed

    return Signed(options.author, options.note) if options.author else Signed(note=options.note)
