"""Authenticates callers by an API key, a token, or the certificate of the connection."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from neuronpipe.core.callers import Caller, is_tenant_name
from neuronpipe.core.errors import SetupError, Unauthenticated
from neuronpipe.core.logs import SeldomWarnings
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.callers.keys import PREFIX, CredentialsRefused, KeyRecord, WatchedFile, find_key, parse_keys
from neuronpipe.gateway.callers.settings import CallerSettings, open_services
from neuronpipe.platform.process.door import Credentials

if TYPE_CHECKING:
    from neuronpipe.gateway.callers.tokens import TokenVerifier

_MESSAGE = "no valid API key, token or client certificate came with the call"
_SCHEME = "bearer "


class Authenticator:
    """A Guard (platform/process/door.py) by the files of the settings.

    `tenant_of`: the tenant of a name in a client certificate; empty for none. `acts_for_others`: whether a tenant may
    call on behalf of others.
    """

    def __init__(
        self,
        settings: CallerSettings,
        tenant_of: Callable[[str], str],
        meters: Meters,
        acts_for_others: Callable[[str], bool] = lambda tenant: False,
    ) -> None:
        """Raises SetupError."""
        self.open_services: Collection[str] = open_services(settings.open_services)
        self._is_shared = settings.shared_cache
        self._tenant_of = tenant_of
        self._acts_for_others = acts_for_others
        self._meters = meters
        self._warnings = SeldomWarnings()
        self._keys: WatchedFile[Mapping[str, KeyRecord]] | None = None
        self._tokens: WatchedFile[TokenVerifier] | None = None
        if settings.api_keys:
            self._keys = WatchedFile("--api-keys", settings.api_keys, self._parse_keys, meters)
        if settings.jwks:
            if not (settings.jwt_issuer and settings.jwt_audience):
                raise SetupError(
                    "jwks: needs jwt_issuer and jwt_audience, or tokens for other services would be accepted"
                )
            from neuronpipe.gateway.callers import tokens  # cryptography takes long to import

            rules = tokens.TokenRules(settings.jwt_issuer, settings.jwt_audience, settings.jwt_tenant_claim)
            self._tokens = WatchedFile("--jwks", settings.jwks, partial(tokens.TokenVerifier, rules=rules), meters)

    @property
    def files(self) -> list[WatchedFile[Mapping[str, KeyRecord]] | "WatchedFile[TokenVerifier]"]:
        """The files that must be watched."""
        return [file for file in (self._keys, self._tokens) if file]

    def _parse_keys(self, content: bytes) -> Mapping[str, KeyRecord]:
        return parse_keys(content, must_tell=bool(self._keys and self._keys.value))

    def identify(self, credentials: Credentials) -> Caller:
        """Returns the caller. Raises Unauthenticated."""
        try:
            name, tenant = self._identify(credentials)
            if credentials.on_behalf:
                if not self._acts_for_others(tenant):
                    raise CredentialsRefused("acts_for_others")
                if not is_tenant_name(credentials.on_behalf):
                    raise CredentialsRefused("tenant_name")
                tenant = credentials.on_behalf
        except CredentialsRefused as refused:
            self._note(str(refused))
            raise Unauthenticated(_MESSAGE) from None
        self._meters.counter(Metrics.AUTHENTICATIONS, "accepted").add()
        return Caller(name, tenant, "" if self._is_shared else tenant)

    def _identify(self, credentials: Credentials) -> tuple[str, str]:
        """Returns the caller's name and tenant. Raises CredentialsRefused."""
        if not credentials.authorization:
            for name in credentials.names:
                if tenant := self._tenant_of(name):
                    return name, tenant
            raise CredentialsRefused("unknown_certificate" if credentials.names else "missing")
        if credentials.authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise CredentialsRefused("malformed")
        secret = credentials.authorization[len(_SCHEME) :].strip()
        if secret.startswith(PREFIX):
            record = find_key(self._keys.value, secret) if self._keys else None
            if record is None:
                raise CredentialsRefused("unknown_key")
            if record.has_expired:
                raise CredentialsRefused("expired")
            return record.name, record.tenant
        if not self._tokens:
            raise CredentialsRefused("unknown_key")
        identity = self._tokens.value.identify(secret)
        return identity.subject, identity.tenant

    def _note(self, reason: str) -> None:
        self._meters.counter(Metrics.AUTHENTICATIONS, reason).add()
        self._warnings.log("a caller is not authenticated", reason, reason=reason)
