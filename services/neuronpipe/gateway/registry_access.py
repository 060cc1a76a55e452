"""Who may see and change the registry of the gateway's repository, whatever the door."""

import asyncio
from collections.abc import Callable

from neuronpipe.bundles.registry import Registry
from neuronpipe.core.callers import Caller
from neuronpipe.core.errors import ChangeRefused, ModelNotFound, NotAllowed, SetupError
from neuronpipe.gateway.tenants.tenants import Tenants


def may_see(tenants: Tenants | None, caller: Caller, model: str) -> bool:
    """Whether a caller may know what is registered of a model. `tenants`: None where everybody may who may call."""
    models = tenants.models_of(caller) if tenants else None
    return models is None or model in models


def check_may_change(tenants: Tenants | None, caller: Caller, model: str) -> None:
    """Raises NotAllowed for a tenant without the right, and ModelNotFound for a model that it may not use."""
    if tenants and not tenants.manages_registry(caller):
        raise NotAllowed(f"tenant {caller.tenant!r} does not have the right manages_registry")
    if not may_see(tenants, caller, model):
        raise ModelNotFound(f"model {model!r} is not registered")


async def registry_of(work: Callable[[], Registry]) -> Registry:
    """What reading or changing a registry returns, from a thread. Raises ChangeRefused where that is not possible."""
    try:
        return await asyncio.to_thread(work)
    except SetupError as error:
        raise ChangeRefused(str(error)) from error
