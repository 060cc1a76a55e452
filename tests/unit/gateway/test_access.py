"""gateway/access.py: what the settings make of callers and tenants."""

import asyncio
import threading
from pathlib import Path

import pytest

from neuronpipe.bundles.registry import Registry
from neuronpipe.core.errors import SetupError, Unauthenticated
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.access import Access, registry_of
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.gateway.callers.settings import CallerSettings
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.platform.cache.settings import NO_REDIS
from neuronpipe.platform.process.door import Credentials

_PUBLIC = ("0.0.0.0:50050",)
_NAME = "spiffe://test/search"


def _access(*, addresses: tuple[str, ...] = _PUBLIC, verifies_certificates: bool = False, **given: object) -> Access:
    callers, pipeline = CallerSettings.model_validate(given), PipelineSettings()
    return Access(callers, pipeline, NO_REDIS, addresses, Telemetry(), verifies_certificates=verifies_certificates)


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(f'[tenants.search]\nmodels = []\ncertificates = ["{_NAME}"]\n')
    return path


def test_without_settings_everybody_on_this_machine_may_call() -> None:
    access = _access(addresses=("127.0.0.1:50050",))
    assert access.guard is None
    assert access.tenants is None


def test_a_public_address_needs_a_way_to_know_callers(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="can be reached from other machines"):
        _access()
    assert _access(insecure_public=True).guard is None
    create_key(tmp_path / "keys", "a", "a")
    assert _access(api_keys=tmp_path / "keys").guard


def test_verified_certificates_alone_let_everybody_who_has_one_call() -> None:
    assert _access(verifies_certificates=True).guard is None


def test_a_certificate_is_no_key_where_keys_are_asked_for(tmp_path: Path) -> None:
    create_key(tmp_path / "keys", "a", "a")
    guard = _access(api_keys=tmp_path / "keys", verifies_certificates=True).guard
    assert guard
    with pytest.raises(Unauthenticated):
        guard.identify(Credentials(names=(_NAME,)))


def test_verified_certificates_name_tenants_without_any_key(tenants: Path) -> None:
    access = _access(tenants=tenants, verifies_certificates=True)
    assert access.guard
    assert access.guard.identify(Credentials(names=(_NAME,))).tenant == "search"


def test_tenants_need_callers_that_are_known(tenants: Path) -> None:
    with pytest.raises(SetupError, match="--tenants: needs --api-keys, --jwks or --tls-client-ca"):
        _access(addresses=(), tenants=tenants)


async def test_a_registry_that_hangs_takes_no_thread_from_other_calls() -> None:
    ends = threading.Event()

    def read() -> Registry:
        ends.wait()
        return Registry()

    hung = [asyncio.create_task(registry_of(read)) for _ in range(100)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(5):
            await asyncio.to_thread(bool)
    finally:
        ends.set()
    assert await asyncio.gather(*hung) == [Registry()] * 100
