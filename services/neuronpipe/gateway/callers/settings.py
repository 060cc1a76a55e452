"""Settings of authentication and tenants: for the gateway, and for all services in one process."""

from pathlib import Path

from pydantic import Field, field_validator

from neuronpipe.core.addresses import is_loopback
from neuronpipe.core.errors import SetupError
from neuronpipe.core.settings import Settings
from neuronpipe.core.units import words_of

_SERVICES = ("health", "reflection", "metrics")


class CallerSettings(Settings):
    """Settings of authentication and of tenants' rights."""

    api_keys: Path | None = Field(
        None, description="file of the accepted API keys, as `neuronpipe key create` writes it; read again on change"
    )
    jwks: Path | None = Field(
        None, description="JWKS file of the keys that sign accepted tokens (JWT, RS256 and ES256); read again on change"
    )
    jwt_issuer: str = Field("", description="the `iss` that tokens must have; required with jwks")
    jwt_audience: str = Field("", description="the `aud` that tokens must have; required with jwks")
    jwt_tenant_claim: str = Field("tenant", min_length=1, description="the claim of a token that names its tenant")
    tenants: Path | None = Field(
        None, description="TOML file of the tenants' models, quotas, shares and certificates; read again on change"
    )
    open_services: str = Field(
        "health",
        description="services that need no credentials although calls need them: health, reflection, metrics, with "
        "commas; metrics only at metrics_listen if it is set",
    )
    shared_cache: bool = Field(
        False, description="share caches between tenants; a tenant can then detect earlier requests of other tenants"
    )
    insecure_public: bool = Field(
        False,
        description="listen on other addresses than loopback without authentication: any program that reaches them may "
        "call",
    )

    @field_validator("open_services")
    @classmethod
    def _check_services(cls, services: str) -> str:
        unknown = open_services(services).difference(_SERVICES)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: is none of {', '.join(_SERVICES)}")
        return services

    @property
    def has_authentication(self) -> bool:
        """Whether callers must say who they are."""
        return bool(self.api_keys or self.jwks)


def open_services(setting: str) -> frozenset[str]:
    return frozenset(words_of(setting))


def check_exposure(settings: CallerSettings, *addresses: str) -> None:
    """Raises SetupError if other machines reach an address, unless the settings let any client call."""
    public = [address for address in addresses if address and not is_loopback(address)]
    if public and not settings.insecure_public:
        raise SetupError(
            f"{', '.join(public)} can be reached from other machines, and callers are not authenticated: set "
            "--api-keys, --jwks or --tls-client-ca; or --insecure-public if only permitted programs reach the address "
            "(see docs/security.md)"
        )
