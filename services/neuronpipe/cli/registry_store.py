"""Where `neuronpipe registry` reads and changes a registry: in a repository, or at a gateway."""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from neuronpipe.cli.repository import add_repository, opened
from neuronpipe.cli.request import add_key, add_tls, parse_target, tls_files
from neuronpipe.core.errors import ChangeRefused, SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest
    from neuronpipe.bundles.registry import Operation, Registry, Signed
    from neuronpipe.bundles.sources import Repository
    from neuronpipe.platform.tls import TlsFiles

ResponseT = TypeVar("ResponseT")

_LIMIT_S = 30.0
# Between reading and writing others may write; so often the change is made anew.
_ATTEMPTS = 10


class RegistryStore(Protocol):
    """A registry. Raises SetupError and NeuronpipeError."""

    def read(self) -> "Registry":
        """What is registered; of revision 0 for nothing."""

    def change(self, operation: "Operation", signed: "Signed") -> "Registry":
        """Applies an operation on a model's routing to the registry as it is then."""

    def decide(self, name: str, version: int, signed: "Signed", *, approves: bool) -> "Registry":
        """Approves or rejects a version."""


def add_store(parser: argparse.ArgumentParser) -> None:
    """Adds the options that store_of reads."""
    place = parser.add_mutually_exclusive_group(required=True)
    add_repository(parser, place)
    place.add_argument(
        "--target", type=parse_target, metavar="HOST:PORT", help="a gateway that runs with --registry-service"
    )
    add_tls(parser)
    add_key(parser)


def store_of(options: argparse.Namespace) -> RegistryStore:
    """The registry that the options name. Raises SetupError."""
    if options.target:
        return GatewayStore(options.target, tls_files(options))
    return RepositoryStore(opened(options), getattr(options, "trusted_keys", None))


class RepositoryStore:
    """See RegistryStore."""

    def __init__(self, repository: "Repository", trusted_keys: Path | None) -> None:
        self._repository = repository
        self._trusted_keys = trusted_keys

    def read(self) -> "Registry":
        return self._repository.read_registry()

    def change(self, operation: "Operation", signed: "Signed") -> "Registry":
        return self._repository.change_registry(operation, signed)

    def decide(self, name: str, version: int, signed: "Signed", *, approves: bool) -> "Registry":
        from neuronpipe.bundles.sources import approve_version, reject_version
        from neuronpipe.core.items import ModelKey

        key = ModelKey(name, version)
        if approves:
            return self.change(approve_version(self._repository, key, self._trusted_keys, signed), signed)
        return self.change(reject_version(self._repository, key, signed), signed)


class GatewayStore:
    """See RegistryStore. A gateway's part of the registry: what the caller's tenant may see."""

    def __init__(self, target: str, tls: "TlsFiles | None") -> None:
        self._target = target
        self._tls = tls

    def read(self) -> "Registry":
        from neuronpipe.api.v1.registry_pb2 import GetRegistryRequest

        return self._call(lambda stub, **options: stub.GetRegistry(GetRegistryRequest(), **options))

    def change(self, operation: "Operation", signed: "Signed") -> "Registry":
        """Makes the change here, and has the gateway write it where nobody else has written meanwhile."""
        from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest, RouteShare, Routing, SetAlias, Shadow

        for attempt in range(_ATTEMPTS):
            present = self.read()
            changes = [one for one in operation(present).history if one.revision > present.revision]
            change = changes[-1]
            route = [RouteShare(target=target, share=share) for target, share in change.route.items()]
            aliases = [SetAlias(alias=alias, version=version) for alias, version in change.aliases.items()]
            routing = Routing(aliases=aliases, route=route, is_unloaded=change.is_unloaded)
            if change.shadow:
                routing.shadow.CopyFrom(Shadow(target=change.shadow.target, percent=change.shadow.percent))
            # The action has the note.
            request = ChangeRegistryRequest(
                model=change.model,
                author=signed.author,
                routing=routing,
                action=", ".join(one.action for one in changes),
                if_revision=present.revision,
            )
            try:
                return self._change(request)
            except ChangeRefused:
                if attempt + 1 == _ATTEMPTS or self.read().revision == present.revision:
                    raise
        raise AssertionError

    def decide(self, name: str, version: int, signed: "Signed", *, approves: bool) -> "Registry":
        from neuronpipe.api.v1.registry_pb2 import ChangeRegistryRequest

        request = ChangeRegistryRequest(model=name, note=signed.note, author=signed.author)
        setattr(request, "approve" if approves else "reject", version)
        return self._change(request)

    def _change(self, request: "ChangeRegistryRequest") -> "Registry":
        return self._call(lambda stub, **options: stub.ChangeRegistry(request, **options))

    def _call(self, ask: Callable[..., Awaitable[Any]]) -> "Registry":
        return asyncio.run(self._ask(ask))

    async def _ask(self, ask: Callable[..., Awaitable[Any]]) -> "Registry":
        import grpc

        from neuronpipe.api.v1.registry_pb2_grpc import RegistryServiceStub
        from neuronpipe.bundles.registry import Registry
        from neuronpipe.rpc.client import Connection, error_of, key_metadata

        key = key_metadata(target=self._target, is_encrypted=self._tls is not None)
        connection = Connection(self._target, RegistryServiceStub, tls=self._tls)
        try:
            with connection.use() as stub:
                answer = await ask(stub, timeout=_LIMIT_S, metadata=key)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise SetupError(f"--target {self._target}: the gateway runs without --registry-service") from failure
            raise error_of(failure) from failure
        finally:
            await connection.close()
        return Registry.model_validate_json(answer.registry_json)
