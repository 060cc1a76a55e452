"""`neuronpipe bundle`: signs bundles, verifies their signatures, uploads and compares them, and deletes leftovers."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.cli.repository import add_repository, opened, tell_registry
from neuronpipe.cli.terminal import ending_on_sigterm, option, report, subcommand
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.bucket_repository import BucketRepository

HELP = "sign bundles, verify their files and signatures, upload them, delete leftovers, or say what differs between two"
EXTRA = "server"

# Digits of a key's id that are shown.
_SHOWN = 16
_MAX_GRACE_HOURS = 24 * 365 * 10


def add_options(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    keygen = subcommand(verbs, "keygen", _keygen, "make an ed25519 key to sign with, and its public key, in PEM form")
    option(keygen, "--key FILE", "the file of the private key", Path, required=True)
    option(keygen, "--public-key FILE", "the file of the public key", Path, required=True)
    sign = subcommand(verbs, "sign", _sign, "verify the files of bundles, and sign them")
    option(sign, "--key FILE", "the private key, ed25519 in PEM form, no passphrase", Path, required=True)
    verify = subcommand(verbs, "verify", _verify, "verify the signature and every file of bundles")
    add_trusted_keys(verify, required=True)
    for verb in (sign, verify):
        option(verb, "bundles BUNDLE", "a bundle's folder, MODEL/VERSION", Path, nargs="+")
    push = subcommand(
        verbs, "push", _push, "upload bundles to a repository in a bucket; files that it has already are not sent again"
    )
    add_repository(push)
    option(push, "--approve", "approve the versions in the repository's registry")
    option(push, "bundles BUNDLE", "a bundle's folder, MODEL/VERSION", Path, nargs="+")
    collect = subcommand(
        verbs, "gc", _collect_garbage, "delete the files of a repository in a bucket that no version needs any more"
    )
    add_repository(collect)
    option(collect, "--dry-run", "only say what would be deleted")
    option(collect, "--grace-hours HOURS", "spare younger files, such as files of a running push (default: 24)", 24.0)
    diff = subcommand(verbs, "diff", _diff, "say what differs between two bundles: settings of the manifest, and files")
    for name in ("before", "after"):
        diff.add_argument(name, type=Path, metavar=name.upper(), help="a bundle's folder, MODEL/VERSION")


def add_trusted_keys(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    option(
        parser,
        "--trusted-keys FILE",
        "file or folder of ed25519 public keys in PEM form; bundles that no such key signed are refused",
        Path,
        required=required,
    )


def _keygen(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.signing import create_key

    print(f"made the key {create_key(options.key, options.public_key)[:_SHOWN]}: {options.key}, {options.public_key}")


def _sign(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.signing import SigningKey
    from neuronpipe.bundles.writing import sign_bundle

    key = SigningKey.read(options.key, "--key")
    for folder in options.bundles:
        bundle = sign_bundle(folder, key)
        print(f"{folder}: signed {_described(bundle.key, len(bundle.manifest.files))} with the key {key.id[:_SHOWN]}")


def _verify(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.repository import read_bundle
    from neuronpipe.bundles.signing import TrustedKeys

    trusted = TrustedKeys.read(options.trusted_keys)
    for folder in options.bundles:
        bundle = read_bundle(folder, trusted)
        bundle.files.check()
        described = _described(bundle.key, len(bundle.manifest.files))
        print(f"{folder}: {described}, signed with the key {bundle.signer[:_SHOWN]}")


def _push(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.registry import Registry, Signed
    from neuronpipe.bundles.repository import read_bundle

    repository = _bucket(options)
    for folder in options.bundles:
        bundle = read_bundle(folder)
        repository.push(bundle, report)
        print(f"{options.repository.rstrip('/')}/{bundle.spec.name}/{bundle.spec.version}")
        if options.approve:
            signed = Signed(note="pushed with --approve")
            approve = partial(Registry.approve, bundle=bundle, signed=signed)
            tell_registry(repository.change_registry(approve, signed, bundle.key), bundle.spec.name)


def _collect_garbage(options: argparse.Namespace) -> None:
    if not 0 <= options.grace_hours <= _MAX_GRACE_HOURS:
        raise SetupError(f"--grace-hours: must be from 0 to {_MAX_GRACE_HOURS:,}")
    with ending_on_sigterm():
        unneeded = _bucket(options).collect_garbage(options.grace_hours * 3600, deletes=not options.dry_run)
    for file in unneeded:
        print(f"{file.name}: {file.size:,} bytes")
    size_bytes = sum(file.size for file in unneeded)
    print(f"{len(unneeded)} files, {size_bytes:,} bytes {'to delete' if options.dry_run else 'deleted'}")


def _bucket(options: argparse.Namespace) -> "BucketRepository":
    from neuronpipe.bundles.bucket_repository import BucketRepository

    repository = opened(options)
    if not isinstance(repository, BucketRepository):
        raise SetupError(f"--repository {options.repository}: must be s3://BUCKET/PREFIX")
    return repository


def _diff(options: argparse.Namespace) -> None:
    from neuronpipe.bundles.repository import read_bundle
    from neuronpipe.bundles.writing import differences

    for line in differences(read_bundle(options.before), read_bundle(options.after)):
        print(line)


def _described(key: tuple[str, int], files: int) -> str:
    return f"{key[0]} version {key[1]}, {files} files"
