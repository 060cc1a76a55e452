"""Servers are replaced under load, by others on the same port. No call fails, and no client has a retry policy."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.interop.cases import restart_case
from tests.interop.conftest import Started
from tests.interop.known import known_of
from tests.interop.results import RESTART, Result
from tests.interop.run import CLIENTS, PLAIN, TLS, Client, Server, make_tls, running_echo
from tests.servers.ports import free_port
from tests.suite.waiting import until

pytestmark = [pytest.mark.local_only, pytest.mark.long]

_RESTARTS = int(os.environ.get("NEURONPIPE_RESTARTS", "1"))
# A start, and a stop; the machine may be busy.
_RESTART_S = 8.0
# Calls after which a server is known to take its share.
_ENOUGH = 100
_CASE = restart_case((_RESTARTS + 1) * _RESTART_S)


@pytest.mark.timeout(300 + _RESTARTS * 3 * _RESTART_S)
@pytest.mark.parametrize("security", [PLAIN, TLS])
@pytest.mark.parametrize(
    "client",
    [client for client in CLIENTS if client.runs(_CASE, PLAIN) and not client.proxy],
    ids=lambda client: client.name,
)
def test_no_call_fails_while_servers_are_replaced(
    started: Started, results: list[Result], tmp_path: Path, client: Client, security: str
) -> None:
    tls = make_tls(security, tmp_path)
    options = ("--listen", f"127.0.0.1:{free_port()}", "--shares-port", "true")
    with ExitStack() as stack:
        old = stack.enter_context(running_echo(tls, *options))
        ends_s = time.monotonic() + (_RESTARTS + 1) * _RESTART_S
        process = started.client(client)
        process.begin(_CASE, old.process.target, old.tls)
        _wait_until_it_answers(old)
        stops_s: list[float] = []
        for _ in range(_RESTARTS):
            new = stack.enter_context(running_echo(tls, *options))
            old.process.signal(signal.SIGTERM)
            began_s = time.monotonic()
            assert old.process.wait() == 0
            stops_s.append(time.monotonic() - began_s)
            _wait_until_it_answers(new)
            old = new
        assert time.monotonic() < ends_s, "the load ended before the restarts"
        ended = process.end()
    problems: list[str] = []
    for check, call in zip(_CASE.checks, ended, strict=True):
        try:
            check(call)
        except AssertionError as error:
            problems.append(str(error))
    calls = sum(count for call in ended for count in call.statuses.values())
    print(f"{client.name}: {calls} calls, {problems}, stops took {', '.join(f'{took_s:.1f}' for took_s in stops_s)} s")
    known = known_of("restart", client.name)
    reason = known.reason if known else ""
    figures = {"calls": calls, "restarts": _RESTARTS, "stop_s": max(stops_s)}
    results.append(Result(client.name, security, RESTART, "; ".join(problems), reason, figures))
    assert not problems or known, problems


def _wait_until_it_answers(server: Server) -> None:
    until(lambda: server.seen().get("echoed", 0) > _ENOUGH)
