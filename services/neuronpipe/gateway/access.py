"""Access to a gateway, the same for every door: its callers, the rights of tenants, and the rights to its registry."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from neuronpipe.bundles.registry import Registry
from neuronpipe.core.callers import Caller
from neuronpipe.core.errors import ChangeRefused, ModelNotFound, NotAllowed, SetupError, Unauthenticated
from neuronpipe.core.metrics import MayRead, Telemetry, all_may_read
from neuronpipe.gateway.callers.authenticator import Authenticator
from neuronpipe.gateway.callers.keys import WatchedFile
from neuronpipe.gateway.callers.settings import CallerSettings, check_exposure
from neuronpipe.gateway.settings import GatewaySettings, PipelineSettings
from neuronpipe.gateway.tenants.tenants import EVERYTHING, Rights, TenantBook, Tenants, parse_tenants
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.door import Credentials
from neuronpipe.platform.process.settings import ProcessSettings, ServerTlsSettings
from neuronpipe.platform.watched import watching

# Compute time of the requests of a model that run at once. Further requests wait for their tenant's turn. A shorter
# window is fairer, a longer one allows larger batches.
_FAIR_WINDOW_S = 0.02


class Access:
    """The guard of a gateway's doors, and the tenants of its pipeline; both are None where any client may call."""

    def __init__(
        self,
        callers: CallerSettings,
        pipeline: PipelineSettings,
        redis: RedisSettings,
        addresses: Sequence[str],
        telemetry: Telemetry,
        *,
        verifies_certificates: bool = False,
    ) -> None:
        """`addresses`: the addresses of the gateway. `verifies_certificates`: whether its doors require a certificate,
        whose names the file of tenants may list. Without keys, tokens and tenants, all callers with a certificate may
        call, without a tenant. Raises SetupError.
        """
        has_authentication = callers.has_authentication or (verifies_certificates and callers.tenants is not None)
        if not (has_authentication or verifies_certificates):
            check_exposure(callers, *addresses)
        self.guard: Authenticator | None = None
        self.may_read_metrics: MayRead = all_may_read
        self.tenants: Tenants | None = None
        self._redis = redis
        self._meters = telemetry.meters
        self._book: WatchedFile[TenantBook] | None = None
        if not has_authentication:
            if callers.tenants:
                raise SetupError("--tenants: needs --api-keys, --jwks or --tls-client-ca, which name the tenant")
            return
        if callers.tenants:
            self._book = WatchedFile("--tenants", callers.tenants, parse_tenants, self._meters)
        guard = self.guard = Authenticator(callers, self._tenant_of, self._meters, self._acts_for_others)
        limits = pipeline.max_requests_in_flight, pipeline.max_tokens_in_flight
        self.tenants = Tenants(self._rights_of, limits, _FAIR_WINDOW_S, self._meters)
        if "metrics" not in guard.open_services:

            def may_read(authorization: str) -> bool:
                try:
                    guard.identify(Credentials(authorization))
                except Unauthenticated:
                    return False
                return True

            self.may_read_metrics = may_read

    @asynccontextmanager
    async def kept_up_to_date(self, *, shares_budgets: bool = True) -> AsyncIterator[None]:
        """Follows changes of the files, and shares budgets with other gateways through Redis, while the block runs."""
        async with AsyncExitStack() as stack:
            files = [*(self.guard.files if self.guard else ()), *filter(None, [self._book])]
            if files:
                stack.enter_context(watching(*files))
            if shares_budgets and self.tenants and self._book and self._redis.redis_url:
                # Imported here, since redis-py takes 0.1 s to import.
                from neuronpipe.gateway.tenants.shared_budgets import running_shared_budgets

                await stack.enter_async_context(running_shared_budgets(self._redis, self.tenants, self._meters))
            yield

    def _rights_of(self, tenant: str) -> Rights:
        return self._book.value.rights_of(tenant) if self._book else EVERYTHING

    def _tenant_of(self, name: str) -> str:
        return self._book.value.tenant_of(name) if self._book else ""

    def _acts_for_others(self, tenant: str) -> bool:
        return bool(self._book) and self._rights_of(tenant).acts_for_others


def access_by(
    settings: GatewaySettings,
    process: ProcessSettings,
    tls: ServerTlsSettings,
    redis: RedisSettings,
    telemetry: Telemetry,
) -> Access:
    """Makes the access to a gateway with these settings. Raises SetupError."""
    addresses, verifies = (process.listen, settings.http.http_listen), bool(tls.tls_client_ca)
    return Access(settings.callers, settings.pipeline, redis, addresses, telemetry, verifies_certificates=verifies)


def may_see(tenants: Tenants | None, caller: Caller, model: str) -> bool:
    """Returns whether a caller may see a model in the registry. `tenants`: None where every caller may."""
    models = tenants.models_of(caller) if tenants else None
    return models is None or model in models


def check_may_change(tenants: Tenants | None, caller: Caller, model: str) -> None:
    """Raises NotAllowed if the tenant lacks the right, and ModelNotFound if it may not use the model."""
    if tenants and not tenants.rights_of(caller.tenant).manages_registry:
        raise NotAllowed(f"tenant {caller.tenant!r} does not have the right manages_registry")
    if not may_see(tenants, caller, model):
        raise ModelNotFound(f"model {model!r} is not registered")


async def registry_of(work: Callable[[], Registry]) -> Registry:
    """Reads or changes a registry in a thread. Raises ChangeRefused where that is not possible."""
    try:
        return await run_apart(work)  # the bucket may hang
    except SetupError as error:
        raise ChangeRefused(str(error)) from error
