"""gateway/tenants/tenants.py: the file of the tenants."""

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.gateway.tenants.tenants import parse_tenants

_FILE = b"""
[tenants.search]
models = ["minilm"]
weight = 2
max_requests_in_flight = 10
max_tokens_in_flight = 1000
tokens_per_minute = 60000
highest_priority = "bulk"
certificates = ["spiffe://example.org/search"]

[tenants."*"]
models = []
"""


def test_every_right_is_read() -> None:
    rights = parse_tenants(_FILE).rights_of("search")
    assert rights.models == frozenset({"minilm"})
    assert (rights.weight, rights.highest_priority) == (2, "bulk")
    assert (rights.max_requests_in_flight, rights.max_tokens_in_flight, rights.tokens_per_minute) == (10, 1000, 60000)


def test_without_limits_a_tenant_may_do_everything() -> None:
    rights = parse_tenants(b"[tenants.a]").rights_of("a")
    assert rights.models is None
    assert rights.tokens_per_minute is None
    assert rights.highest_priority == "interactive"


def test_a_tenant_that_is_not_named_has_the_entry_for_all_others() -> None:
    assert parse_tenants(b'[tenants."*"]\nweight = 7').rights_of("unknown").weight == 7


def test_a_tenant_that_is_not_named_has_no_models_without_such_an_entry() -> None:
    assert parse_tenants(b"[tenants.a]").rights_of("unknown").models == frozenset()


def test_a_name_in_a_certificate_finds_its_tenant() -> None:
    book = parse_tenants(_FILE)
    assert book.tenant_of("spiffe://example.org/search") == "search"
    assert book.tenant_of("spiffe://example.org/other") == ""


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[tenants.a\n", "is no TOML in UTF-8"),
        (b"\xff", "is no TOML in UTF-8"),
        (b"x = " + b"[" * 10_000, "is no TOML in UTF-8"),
        (b"x = 1" + b"0" * 5000, "is no TOML in UTF-8"),
        (b"[tenants.a]\nmax_jobs = 1" + b"0" * 400, "tenants.a.max_jobs: Input should be less than or equal to 10000"),
        (
            b'[tenants.a]\ncertificates = ["x", "y"]\n[tenants.b]\ncertificates = ["y"]',
            "certificates: several tenants have y",
        ),
        (b"x = 1", "tenants: Field required"),
        (b"[tenants.a]\nmodel = []", "tenants.a.model: Extra inputs are not permitted"),
        (b"[tenants.a]\nweight = 0", "tenants.a.weight: Input should be greater than 0"),
        (b"[tenants.a]\ntokens_per_minute = 0", "tenants.a.tokens_per_minute"),
        (b'[tenants.a]\nhighest_priority = "urgent"', "tenants.a.highest_priority"),
        (
            b"[tenants.a]\nmax_requests_in_flight = true",
            "tenants.a.max_requests_in_flight: Input should be a valid int",
        ),
        (b'[tenants.a]\ntokens_per_minute = "5"', "tenants.a.tokens_per_minute: Input should be a valid integer"),
        (b"[tenants.a]\nmax_jobs = 5.0", "tenants.a.max_jobs: Input should be a valid integer"),
        (b"[tenants.a]\nweight = true", "tenants.a.weight: Input should be a valid number"),
        (b'[tenants.a]\nweight = "2"', "tenants.a.weight: Input should be a valid number"),
        (b'[tenants.a]\nmanages_registry = "yes"', "tenants.a.manages_registry: Input should be a valid boolean"),
        (b"[tenants.a]\nacts_for_others = 1", "tenants.a.acts_for_others: Input should be a valid boolean"),
        (b'[tenants.a]\nmodels = "minilm"', "tenants.a.models: Input should be a valid frozenset"),
    ],
)
def test_the_place_at_fault_is_named(content: bytes, place: str) -> None:
    with pytest.raises(SetupError) as raised:
        parse_tenants(content)
    assert place in str(raised.value)
