"""`neuronpipe key`: makes, lists and revokes the API keys of a gateway."""

import argparse
from pathlib import Path

from neuronpipe.cli.terminal import print_table
from neuronpipe.core.errors import SetupError

HELP = "make, list or revoke API keys in the file of a gateway's --api-keys"
EXTRA = "gateway"
_MAX_DAYS = 36_500


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neuronpipe key`."""
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    create = verbs.add_parser("create", help="make a key, and print it once, alone on the last line")
    create.set_defaults(verb=_create)
    create.add_argument("--tenant", required=True, metavar="T", help="the tenant whose quota its calls count to")
    create.add_argument("--name", default="", metavar="N", help="who uses it, for the list (default: the tenant)")
    create.add_argument(
        "--days", type=float, metavar="D", help="days after which it expires (default: it stays until it is revoked)"
    )
    show = verbs.add_parser("list", help="list the keys, without their secrets")
    show.set_defaults(verb=_list)
    show.add_argument("--tenant", default="", metavar="T", help="only this tenant's")
    revoke = verbs.add_parser("revoke", help="take keys out of the file; a gateway stops to accept them within seconds")
    revoke.set_defaults(verb=_revoke)
    which = revoke.add_mutually_exclusive_group(required=True)
    which.add_argument("--id", default="", metavar="ID", help="the key of this id, as `list` shows it")
    which.add_argument("--tenant", default="", metavar="T", help="all keys of this tenant")
    for verb in (create, show, revoke):
        verb.add_argument("--api-keys", required=True, type=Path, metavar="FILE", help="the file of the keys")


def run(options: argparse.Namespace) -> None:
    """Runs one of the commands. Raises SetupError."""
    options.verb(options)


def _create(options: argparse.Namespace) -> None:
    from neuronpipe.gateway.callers.keys import create_key

    if options.days is not None and not 0 < options.days <= _MAX_DAYS:
        raise SetupError(f"--days: {options.days:g}, must be more than 0, and at most {_MAX_DAYS}")
    key = create_key(options.api_keys, options.tenant, options.name or options.tenant, options.days)
    print(f"A key of tenant {options.tenant!r} was added to {options.api_keys}. It is shown only here:")
    print(key)


def _list(options: argparse.Namespace) -> None:
    from neuronpipe.gateway.callers.keys import list_keys

    keys = [key for key in list_keys(options.api_keys) if options.tenant in ("", key.tenant)]
    rows = [(key.id, key.created, key.expires or "never", key.tenant, key.name) for key in keys]
    print_table([("ID", "CREATED", "EXPIRES", "TENANT", "NAME"), *rows])


def _revoke(options: argparse.Namespace) -> None:
    from neuronpipe.gateway.callers.keys import revoke_keys

    revoked = revoke_keys(
        options.api_keys, lambda key: key.id == options.id if options.id else key.tenant == options.tenant
    )
    if not revoked:
        raise SetupError(f"{options.api_keys} has no such key; `neuronpipe key list` shows all of them")
    for key in revoked:
        print(f"revoked {key.id} ({key.name})")
