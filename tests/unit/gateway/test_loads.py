"""The rule by which a tenant gets the place of another tenant's newest request."""

from collections.abc import Sequence

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.gateway.loads import ModelLoad, RequestLoad, TenantLoad, newest_of_largest


def _load(tokens: Sequence[int]) -> TenantLoad:
    load = TenantLoad()
    for number in tokens:
        made = RequestLoad(call=Call(), model=ModelLoad("m"), tenant_load=load, tokens=number, shed=lambda: None)
        load.in_flight[made] = None
    return load


def _share(load: TenantLoad, more_requests: int, more_tokens: int) -> float:
    """As of a limit of 10 requests and of 100 tokens."""
    tokens = sum(request.tokens for request in load.in_flight) + more_tokens
    return max((len(load.in_flight) + more_requests) / 10, tokens / 100)


@pytest.mark.parametrize(
    ("own_share", "ends"),
    [
        (0.2, True),  # the other tenant still has as much without its newest request
        (0.21, False),
    ],
)
def test_the_newest_request_of_the_largest_tenant_ends_if_as_much_is_kept(own_share: float, ends: bool) -> None:
    largest, smaller, idle = _load([5, 5, 5]), _load([5, 5]), _load([])
    newest = [*largest.in_flight][-1]
    assert newest_of_largest([smaller, largest, idle], _share, own_share) is (newest if ends else None)


def test_the_tokens_of_the_newest_request_leave_with_it() -> None:
    load = _load([10, 60])
    assert newest_of_largest([load], _share, 0.11) is None  # 70 tokens without 60 are 10
    assert newest_of_largest([load], _share, 0.1) is [*load.in_flight][-1]


def test_no_request_ends_where_no_tenant_has_one() -> None:
    assert newest_of_largest([_load([])], _share, 0.0) is None
