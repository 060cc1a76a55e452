"""Loads and unloads models as callers ask: by the registry, which every process follows."""

import asyncio
from collections.abc import Callable

from neuronpipe.api.v1.models_pb2 import VersionState
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.bundles.sources import Repository, open_repository
from neuronpipe.core.callers import current_caller
from neuronpipe.core.errors import ChangeRefused, DeadlineExceeded
from neuronpipe.core.items import ModelKey
from neuronpipe.gateway.access import check_may_change, registry_of
from neuronpipe.gateway.routing import Router
from neuronpipe.gateway.settings import GatewaySettings
from neuronpipe.gateway.tenants.tenants import Tenants


def model_control(settings: GatewaySettings, tenants: Tenants | None, router: Router | None) -> "ModelControl | None":
    """What callers may do with models; None where it is off, or where versions do not change."""
    if not settings.model_control or router is None:
        return None
    return ModelControl(open_repository(settings.repository, settings.repository_endpoint), tenants, router)


class ModelControl:
    """Changes one registry. `tenants`: None where everybody may who may call at all.

    Every method raises NotAllowed, ModelNotFound, ChangeRefused and DeadlineExceeded.
    """

    def __init__(self, repository: Repository, tenants: Tenants | None, router: Router) -> None:
        self._repository = repository
        self._tenants = tenants
        self._router = router

    async def load(self, name: str, limit_s: float | None) -> None:
        """Has a model served, and returns when every version that its names and shares need is ready here."""
        registry = await self._change(name, is_unloaded=False)
        keys = [ModelKey(name, version) for version in sorted(registry.models[name].declared.versions)]
        loading = {VersionState.VERSION_STATE_LOADING, VersionState.VERSION_STATE_DRAINING}

        def is_settled() -> bool:
            return not any(self._router.describe(key).state in loading for key in keys)

        await self._wait(registry.revision, is_settled, limit_s)
        for model in map(self._router.describe, keys):
            if model.state == VersionState.VERSION_STATE_FAILED:
                raise ChangeRefused(f"model {name!r} version {model.version} cannot be loaded: {model.problem}")

    async def unload(self, name: str, limit_s: float | None) -> None:
        """Has no version of a model served, and returns when new requests do not get it any more."""
        registry = await self._change(name, is_unloaded=True)
        await self._wait(registry.revision, lambda: name not in self._router.served, limit_s)

    async def _change(self, name: str, *, is_unloaded: bool) -> Registry:
        caller = current_caller()
        check_may_change(self._tenants, caller, name)
        signed = Signed(caller.tenant or "anonymous")

        def change() -> Registry:
            present = self._repository.read_registry()
            if name in present.models and present.models[name].is_unloaded == is_unloaded:
                return present
            operation = Registry.unload if is_unloaded else Registry.load
            return self._repository.change_registry(lambda registry: operation(registry, name, signed), signed)

        return await registry_of(change)

    async def _wait(self, revision: int, is_done: Callable[[], bool], limit_s: float | None) -> None:
        """Waits until this gateway follows a revision, and something is done."""
        changed = asyncio.Event()
        unwatch = self._router.watch(changed.set)
        try:
            async with asyncio.timeout(limit_s):
                while self._router.revision < revision or not is_done():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the registry has the change; the gateway has not followed it in time") from None
        finally:
            unwatch()
