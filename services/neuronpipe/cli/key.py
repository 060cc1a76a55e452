"""`neuronpipe key`: makes, lists and revokes the API keys of a gateway."""

import argparse
from pathlib import Path

from neuronpipe.cli.terminal import option, print_table, subcommand
from neuronpipe.core.errors import SetupError

HELP = "make, list or revoke API keys in the file of a gateway's --api-keys"
EXTRA = "gateway"
_MAX_DAYS = 36_500


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    create = subcommand(verbs, "create", _create, "make a key, and print it once, alone on the last line")
    option(create, "--tenant T", "the tenant whose quota its calls count to", required=True)
    option(create, "--name N", "user of the key, for the list (default: the tenant)", "")
    option(create, "--days D", "days after which the key expires (default: never)", float)
    show = subcommand(verbs, "list", _list, "list the keys, without their secrets")
    option(show, "--tenant T", "list only this tenant's keys", "")
    revoke = subcommand(verbs, "revoke", _revoke, "take keys out of the file; gateways refuse them within seconds")
    chosen_keys = revoke.add_mutually_exclusive_group(required=True)
    option(chosen_keys, "--id ID", "the key of this id, as `list` shows it", "")
    option(chosen_keys, "--tenant T", "all keys of this tenant", "")
    for verb in (create, show, revoke):
        option(verb, "--api-keys FILE", "the file of the keys", Path, required=True)


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
