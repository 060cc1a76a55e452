"""neuronpipe.api.v1.RegistryService over gRPC: the registry of the gateway's repository, for its callers.

The service writes the same file as `neuronpipe registry`, which every process follows. Callers of a tenant need a
right.
"""

from dataclasses import replace
from pathlib import Path

from neuronpipe.api.v1 import registry_pb2 as messages
from neuronpipe.bundles.registry import Operation, Registry, Routing, Shadow, Signed
from neuronpipe.bundles.sources import Repository, approve_version, open_repository, reject_version
from neuronpipe.core.callers import Caller, current_caller
from neuronpipe.core.errors import ChangeRefused, InvalidInput, ModelNotFound, SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log_warning
from neuronpipe.gateway.access import check_may_change, may_see, registry_of
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.settings import RepositorySettings
from neuronpipe.rpc.rpcs import Context, RpcHandlers, handlers_of

REGISTRY_SERVICE = messages.DESCRIPTOR.services_by_name["RegistryService"]
_MAX_TEXT = 1000


def registry_handlers(settings: RepositorySettings, tenants: Tenants | None) -> RpcHandlers:
    """Returns the rpcs of the service for the repository of the settings."""
    repository = open_repository(settings.repository)
    return RegistryDoor(repository, settings.trusted_keys, tenants).handlers()


class RegistryDoor:
    """Reads and changes the registry of one repository. `tenants`: None if every caller may change the registry."""

    def __init__(self, repository: Repository, trusted_keys: Path | None, tenants: Tenants | None) -> None:
        self._repository, self._trusted_keys, self._tenants = repository, trusted_keys, tenants

    def handlers(self) -> RpcHandlers:
        return handlers_of(REGISTRY_SERVICE, {"GetRegistry": self.get_registry, "ChangeRegistry": self.change_registry})

    async def get_registry(
        self, request: messages.GetRegistryRequest, context: Context
    ) -> messages.GetRegistryResponse:
        caller = current_caller()
        try:
            registry = await registry_of(self._repository.read_registry)
        except ChangeRefused as error:
            if self._may_change(caller):
                raise
            log_warning("the registry cannot be read", problem=error.message)
            raise ChangeRefused("the registry cannot be read; the log of the gateway says why") from error
        if request.model and (
            request.model not in registry.models or not may_see(self._tenants, caller, request.model)
        ):
            raise ModelNotFound(f"model {request.model!r} is not registered")
        seen = self._part(registry, caller, request.model)
        return messages.GetRegistryResponse(registry_json=seen.model_dump_json())

    async def change_registry(
        self, request: messages.ChangeRegistryRequest, context: Context
    ) -> messages.ChangeRegistryResponse:
        caller = current_caller()
        check_may_change(self._tenants, caller, request.model)
        for field in ("note", "author", "action"):
            text = getattr(request, field)
            if len(text) > _MAX_TEXT:
                raise InvalidInput(field, f"has {len(text)} characters, the limit is {_MAX_TEXT}")
            if not text.isprintable():
                raise InvalidInput(field, "has characters that cannot be printed, such as line breaks")
        registry = await registry_of(lambda: self._change(request, _signed(request, caller)))
        seen = self._part(registry, caller, request.model)
        return messages.ChangeRegistryResponse(registry_json=seen.model_dump_json())

    def _change(self, request: messages.ChangeRegistryRequest, signed: Signed) -> Registry:
        change, name = request.WhichOneof("change"), request.model
        if change == "approve":
            operation = approve_version(self._repository, ModelKey(name, request.approve), self._trusted_keys, signed)
        elif change == "reject":
            operation = reject_version(self._repository, ModelKey(name, request.reject), signed)
        elif change:
            operation = _operation(request, signed)
        else:
            raise InvalidInput("change", "is missing")

        def at_revision(registry: Registry) -> Registry:
            if request.if_revision and request.if_revision != registry.revision:
                raise SetupError(f"the registry has the revision {registry.revision}, not {request.if_revision}")
            return operation(registry)

        return self._repository.change_registry(at_revision, signed)

    def _may_change(self, caller: Caller) -> bool:
        return not self._tenants or self._tenants.rights_of(caller.tenant).manages_registry

    def _part(self, registry: Registry, caller: Caller, model: str) -> Registry:
        """Returns the part of a registry that the caller asks for and may see. `model`: empty for all models.

        Authors and notes of changes are for callers who may change the registry.
        """
        models = {
            name: entry
            for name, entry in registry.models.items()
            if name == (model or name) and may_see(self._tenants, caller, name)
        }
        history = [change for change in registry.history if change.model in models]
        if not self._may_change(caller):
            models, history = {name: entry.anonymous for name, entry in models.items()}, []
        return registry.model_copy(update={"models": models, "history": history})


def _operation(request: messages.ChangeRegistryRequest, signed: Signed) -> Operation:
    """Returns the change of a model's routing. Raises InvalidInput."""
    name = request.model
    if request.HasField("alias"):
        return lambda registry: registry.alias(name, request.alias.alias, request.alias.version or None, signed)
    if request.HasField("roll_back"):
        return lambda registry: registry.roll_back(name, request.roll_back or None, signed)
    routing_message = request.routing
    aliases = {alias.alias: alias.version for alias in routing_message.aliases}
    route = {part.target: part.share for part in routing_message.route}
    if len(aliases) < len(routing_message.aliases):
        raise InvalidInput("routing.aliases", "names an alias twice")
    if len(route) < len(routing_message.route):
        raise InvalidInput("routing.route", "names a target twice")
    shadow = None
    if routing_message.HasField("shadow"):
        shadow = Shadow.model_construct(target=routing_message.shadow.target, percent=routing_message.shadow.percent)
    # set_routing checks the values; here the fields of a message only change their form.
    routing = Routing.model_construct(
        aliases=aliases, route=route, shadow=shadow, is_unloaded=routing_message.is_unloaded
    )
    return lambda registry: registry.set_routing(name, routing, request.action or "routing", signed)


def _signed(request: messages.ChangeRegistryRequest, caller: Caller) -> Signed:
    author = ": ".join(filter(None, (caller.tenant, request.author)))
    return replace(Signed(note=request.note), author=author or "anonymous")
