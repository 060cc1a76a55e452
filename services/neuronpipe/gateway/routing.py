"""The models of a gateway, and the versions that answer: the registry declares them, and every stage has them."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from neuronpipe.api.v1.models_pb2 import Model, VersionState
from neuronpipe.bundles.live import LiveModels
from neuronpipe.bundles.registry import RegisteredModel
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ModelState, ServedModels
from neuronpipe.core.changes import Changes
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import NO_ROUTE, ModelRoute, ModelSpec
from neuronpipe.core.streams import Preparation
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.request_observer import ModelMeters


@dataclass(frozen=True, slots=True)
class GatewayModel:
    """One version of a model. `digest`: the digest of the bundle if its results are cached; otherwise empty."""

    key: ModelKey
    spec: ModelSpec
    meters: ModelMeters
    digest: str = ""


GatewayModels = ServedModels[GatewayModel]


def open_gateway_models(
    meters: Meters, keeps_results: Callable[[Bundle], bool], aliases: Mapping[str, str] = MappingProxyType({})
) -> GatewayModels:
    """Makes an empty table. `keeps_results`: whether a model's results are cached. `aliases`: other names of models. A
    name on the Hub is also a name of the model that was compiled from there, if only one was.
    """

    def other_names(bundles: Iterable[Bundle]) -> Mapping[str, str]:
        compiled: dict[str, set[str]] = {}
        for bundle in bundles:
            if bundle.manifest.source.revision:
                compiled.setdefault(bundle.manifest.source.location, set()).add(bundle.spec.name)
        return {location: name for location, (name, *others) in compiled.items() if not others} | dict(aliases)

    @asynccontextmanager
    async def open_model(bundle: Bundle) -> AsyncIterator[GatewayModel]:
        key = ModelKey(*bundle.key)
        yield GatewayModel(key, bundle.spec, ModelMeters(meters, key), bundle.digest if keeps_results(bundle) else "")

    def adapt(model: GatewayModel, bundle: Bundle) -> GatewayModel:
        key, digest = ModelKey(*bundle.key), f"{model.digest} {bundle.spec.name}" if model.digest else ""
        return GatewayModel(key, bundle.spec, ModelMeters(meters, key), digest)

    return ServedModels(open_model, other_names, adapt)


class VersionRouter:
    """Keeps the routes of a gateway's table, and describes the state of every version."""

    def __init__(
        self, live: LiveModels, models: GatewayModels, near: Sequence[ServedModels[Any]], far: Mapping[str, Coalescer]
    ) -> None:
        """`near`: the tables of stages in this process. `far`: the remote stages."""
        self._live = live
        self._models = models
        self._far = far.values()
        self._stages: Sequence[ServedModels[Any] | Coalescer] = [models, *near, *self._far]
        self._digests: Mapping[ModelKey, str] = {}
        self.changes = Changes()  # routes and states
        live.changes.watch(self._follow)
        for stage in self._stages:
            stage.changes.watch(self._update)
        self._follow()

    @property
    def missing(self) -> list[ModelKey]:
        """The versions that this gateway should have, or still has, and that are not in its table."""
        return sorted((self._live.keys | self._live.repository.desired) - self._models.keys)

    @property
    def unloaded(self) -> list[ModelKey]:
        """The versions of unloaded models that may be served."""
        models = self._live.repository.registry.models.items()
        unloaded = ((name, sorted(model.approved)) for name, model in models if model.is_unloaded)
        return [ModelKey(name, version) for name, versions in unloaded for version in versions]

    @property
    def served(self) -> frozenset[str]:
        """The names of the models that answer requests."""
        return frozenset(key.name for key in self._models.keys)

    @property
    def revision(self) -> int:
        """The revision of the registry that this gateway follows."""
        return self._live.repository.registry.revision

    def describe(self, key: ModelKey) -> Model:
        """Returns the fields of ModelService for the state of a version."""
        route = self._models.table.routes.get(key.name, NO_ROUTE)
        shares = dict(route.shares) or {key.version: float(self._models.table.is_default(*key))}
        name, key = key.name, key.base
        problem = next(filter(None, (stage.problem_of(key) for stage in self._stages)), "")
        return Model(
            name=name,
            version=str(key.version),
            state=self._state_of(key, problem),
            problem=problem,
            aliases=sorted(alias for alias, version in route.aliases.items() if version == key.version),
            share=shares.get(key.version, 0.0) / (sum(shares.values()) or 1.0),
            shadow_share=route.shadow[1] if route.shadow and route.shadow[0] == key.version else 0.0,
            is_desired=key in self._live.repository.desired,
            fetched=self._live.repository.fetched.get(key, 0.0),
            **asdict(sum((stage.preparation_of(key) for stage in self._stages), Preparation())),
        )

    def _state_of(self, key: ModelKey, problem: str) -> "VersionState.ValueType":
        version = self._live.versions.get(key)
        if version and version.state is ModelState.DRAINING:
            return VersionState.VERSION_STATE_DRAINING
        if self._has(key):
            loading = {stage.is_loading(key) for stage in self._stages} - {None}
            if loading:
                return VersionState.VERSION_STATE_LOADING if True in loading else VersionState.VERSION_STATE_UNLOADED
            return VersionState.VERSION_STATE_READY
        return VersionState.VERSION_STATE_FAILED if problem else VersionState.VERSION_STATE_LOADING

    def _follow(self) -> None:
        """Follows a change of the registry, or of the models of this process."""
        self._update()
        for stage in self._far:
            stage.set_needed(self._live.keys)

    def _update(self) -> None:
        """Sets the routes. Until a version is there, the former version keeps its aliases and shares."""
        # A version that is being unloaded has left the table, and its last items may not have been sent.
        digests = {**self._digests, **self._models.digests}
        self._digests = {key: digest for key, digest in digests.items() if key.base in self._live.keys}
        for stage in self._far:
            stage.set_digests(self._digests)
        before = self._models.table.declared_routes
        self._models.route(
            {
                name: self._route(name, model, before.get(name, NO_ROUTE))
                for name, model in self._live.repository.registry.models.items()
                if model.declared.shares
            }
        )
        self.changes.notify()

    def _route(self, name: str, model: RegisteredModel, before: ModelRoute) -> ModelRoute:
        def is_usable(version: int) -> bool:
            return version in model.approved and self._has(ModelKey(name, version))

        aliases = {}
        for alias, version in model.aliases.items():
            former = before.aliases.get(alias, 0)
            aliases[alias] = former if not is_usable(version) and is_usable(former) else version
        wanted = model.routed(aliases)
        shadow = wanted.shadow if wanted.shadow and is_usable(wanted.shadow[0]) else None
        for shares in wanted.shares, before.shares:
            if usable := tuple((version, share) for version, share in shares if is_usable(version)):
                return ModelRoute(aliases, usable, shadow)
        return ModelRoute(aliases, wanted.shares, shadow)

    def _has(self, key: ModelKey) -> bool:
        """Returns whether every stage has a version in at least one process."""
        return all(stage.has(key) for stage in self._stages)
