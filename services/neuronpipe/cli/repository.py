"""Options and messages of commands that use a repository, or a registry in a repository or at a gateway."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.request import add_key, add_tls, parse_target, tls_files
from neuronpipe.cli.terminal import option
from neuronpipe.core.errors import ChangeRefused, SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest
    from neuronpipe.bundles.registry import Operation, RegisteredModel, Registry, Signed
    from neuronpipe.bundles.sources import Repository
    from neuronpipe.platform.tls import TlsFiles

_LIMIT_S = 30.0
# Attempts to make a change: between reading and writing, others may write.
_ATTEMPTS = 10


def add_repository(
    parser: argparse.ArgumentParser, instead_of: "argparse._MutuallyExclusiveGroup | None" = None
) -> None:
    """Adds --repository and --endpoint. `instead_of`: the group of the options that may replace a repository."""
    option(instead_of or parser, "--repository DIR", "folder of bundles or s3://BUCKET/PREFIX", required=not instead_of)
    option(parser, "--endpoint URL", "URL of the object store for s3:// (default: AWS_ENDPOINT_URL, or AWS)", "")


def folder(text: str) -> Path:
    """Reads an option that takes a folder, and no bucket."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a folder; `neuronpipe bundle push` uploads its bundles to s3://BUCKET/PREFIX"
        )
    return Path(text)


def opened(options: argparse.Namespace) -> "Repository":
    """Opens the repository of the options. Raises SetupError."""
    from neuronpipe.bundles.sources import open_repository

    return open_repository(options.repository, options.endpoint)


def tell_registry(registry: "Registry", name: str) -> None:
    """Prints the versions that the model's requests get from now on."""
    model, last = registry.models[name], registry.history[-1]
    shares = ", ".join(f"version {number} {share(model, number)}" for number, _ in model.declared.shares) or "none"
    aliases = ", ".join(f"{alias} {number}" for alias, number in model.aliases.items()) or "none"
    print(f"revision {registry.revision}: {name}: {last.action}")
    shadow = model.declared.shadow
    copies = f"; copies: version {shadow[0]} {copied(model, shadow[0])}" if shadow else ""
    print(f"requests without a version: {shares}; aliases: {aliases}{copies}")


def share(model: "RegisteredModel", number: int) -> str:
    """Returns the share of a version, as a percentage; empty without a share, `unloaded` if the model is unloaded."""
    if model.is_unloaded:
        return "unloaded"
    shares = dict(model.declared.shares)
    return f"{100 * shares[number] / sum(shares.values()):.3g} %" if number in shares else ""


def copied(model: "RegisteredModel", number: int) -> str:
    """Returns the share of the requests that are copied to a version, as a percentage; empty without copies."""
    shadow = model.declared.shadow
    return f"{100 * shadow[1]:.3g} %" if shadow and shadow[0] == number else ""


def add_store(parser: argparse.ArgumentParser) -> None:
    """Adds the options that store_of reads."""
    place = parser.add_mutually_exclusive_group(required=True)
    add_repository(parser, place)
    option(place, "--target HOST:PORT", "a gateway that runs with --registry-service", parse_target)
    add_tls(parser)
    add_key(parser)


def store_of(options: argparse.Namespace) -> "Repository | GatewayRegistry":
    """Returns the registry that the options name. Raises SetupError."""
    return GatewayRegistry(options.target, tls_files(options)) if options.target else opened(options)


class GatewayRegistry:
    """A registry at a gateway, as far as the caller's tenant may see it. Raises SetupError and NeuronpipeError."""

    def __init__(self, target: str, tls: "TlsFiles | None") -> None:
        self._target = target
        self._tls = tls

    def read_registry(self) -> "Registry":
        """Reads the registry; revision 0 for an empty registry."""
        from neuronpipe.api.v1.registry_pb2 import GetRegistryRequest

        return asyncio.run(self._ask(lambda stub, **options: stub.GetRegistry(GetRegistryRequest(), **options)))

    def change_registry(self, operation: "Operation", signed: "Signed") -> "Registry":
        """Makes the change here, and lets the gateway write it unless the registry has changed since it was read."""
        from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest, RouteShare, Routing, SetAlias, Shadow

        for attempt in range(_ATTEMPTS):
            present = self.read_registry()
            changes = [entry for entry in operation(present).history if entry.revision > present.revision]
            change = changes[-1]
            route = [RouteShare(target=target, share=share) for target, share in change.route.items()]
            aliases = [SetAlias(alias=alias, version=version) for alias, version in change.aliases.items()]
            routing = Routing(aliases=aliases, route=route, is_unloaded=change.is_unloaded)
            if change.shadow:
                routing.shadow.CopyFrom(Shadow(target=change.shadow.target, percent=change.shadow.percent))
            # The action contains the note.
            request = ChangeRegistryRequest(
                model=change.model,
                author=signed.author,
                routing=routing,
                action=", ".join(entry.action for entry in changes),
                if_revision=present.revision,
            )
            try:
                return self._change(request)
            except ChangeRefused:
                if attempt + 1 == _ATTEMPTS or self.read_registry().revision == present.revision:
                    raise
        raise AssertionError

    def decide(self, name: str, version: int, signed: "Signed", *, approves: bool) -> "Registry":
        from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest

        request = ChangeRegistryRequest(model=name, note=signed.note, author=signed.author)
        setattr(request, "approve" if approves else "reject", version)
        return self._change(request)

    def _change(self, request: "ChangeRegistryRequest") -> "Registry":
        return asyncio.run(self._ask(lambda stub, **options: stub.ChangeRegistry(request, **options)))

    async def _ask(self, ask: Callable[..., Awaitable[Any]]) -> "Registry":
        import grpc

        from neuronpipe.api.v1.registry_pb2_grpc import RegistryServiceStub
        from neuronpipe.bundles.registry import Registry
        from neuronpipe.rpc.client import ServiceConnection, error_of, key_metadata, undamaged

        key = key_metadata(target=self._target, is_encrypted=self._tls is not None)
        connection = ServiceConnection(self._target, RegistryServiceStub, tls=self._tls)
        try:
            with connection.use() as stub:
                answer = undamaged(await ask(stub, timeout=_LIMIT_S, metadata=key))
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise SetupError(f"--target {self._target}: the gateway runs without --registry-service") from failure
            raise error_of(failure) from failure
        finally:
            await connection.close()
        return Registry.model_validate_json(answer.registry_json)
