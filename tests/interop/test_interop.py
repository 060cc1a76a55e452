"""Clients of other gRPC libraries, and of none, call every feature. `make interop` installs them all; `make test` takes
a sample of those that `make setup` installs, over plain connections.
"""

from collections.abc import Iterator

import pytest

from tests.interop.cases import CASES, Case
from tests.interop.conftest import Started
from tests.interop.known import known_of
from tests.interop.results import Result
from tests.interop.run import CLIENTS, PLAIN, SECURITIES, Client, cases_of, run_case

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


def _matrix() -> Iterator[object]:
    for client in CLIENTS:
        for security in SECURITIES:
            for case in cases_of(client, security, CASES):
                is_long = client.wants or security != PLAIN or case.keepalive_ms
                name = f"{client.name}-{security}-{case.name}"
                yield pytest.param(client, security, case, id=name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(("client", "security", "case"), list(_matrix()))
def test_a_client_is_served_as_the_protocol_says(
    started: Started, results: list[Result], client: Client, security: str, case: Case
) -> None:
    known, problem = known_of(client.name, case.name), ""
    try:
        server = started.server(case.server, security)
        run_case(case, server, started.client(client), started.target(client, server))
    except (AssertionError, TimeoutError) as error:
        problem = str(error).partition("\n")[0] or type(error).__name__
        if not known:
            raise
    finally:
        results.append(Result(client.name, security, case.name, problem, known.reason if known else ""))
    assert problem or not (known and known.is_certain), (
        f"passes now, and tests/interop/known.py says otherwise: {known}"
    )
