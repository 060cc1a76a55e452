"""What all attacks share: a server with tenants, a victim that measures, and the limits that must hold.

An attack is an async function that attacks until it is cancelled, or once. `@attack` makes it a case; a new file of
cases is imported by tests/attack/cases.py.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from demo.processes import ServiceProcess
from neuronpipe.gateway.callers.keys import create_key
from tests.systems.http_server import running_http_server

VICTIM, MALLORY = "victim", "mallory"
_TENANTS = """
[tenants."*"]
"""
# Of the victim's p99: what it may be of that without the attack, or more than it.
_MAX_RATIO, _MAX_MORE_MS = 1.5, 30.0
# Of other work on the machine, which makes all slower, only the best of several tries says nothing.
_TRIES = 3
# Between two attacks, where the latency without them is not looked at.
_REST_S = 0.5
# A constant, beside four times the bytes of what the attack sends at once.
_MEMORY_MIB = 64


@dataclass(frozen=True)
class Attacked:
    """A server under attack. `http`: HOST:PORT. `keys`: by tenant; none where callers need none. `limit_s`: the
    deadline of the victim's calls. `asks_for`: what they are, see victim.py.
    """

    process: ServiceProcess
    http: str
    keys: Mapping[str, str]
    limit_s: float = 20.0
    asks_for: str = "vectors"

    @property
    def target(self) -> str:
        return self.process.target

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What the attacker shows over gRPC."""
        return [("authorization", f"Bearer {self.keys[MALLORY]}")] if self.keys else []

    @property
    def rss_mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / (1 << 20))

    def forget_peak(self) -> None:
        """The peak of its memory begins now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def peak_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


Run = Callable[[Attacked], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """An attack. `finding`: its number in the review. `system`: the server that it attacks, see `SYSTEMS`. `sends_mib`:
    what one request becomes once it is decompressed; memory may grow by four times as much, and `constant_mib`.
    `is_quick`: in the sample of `make test`.
    """

    name: str
    finding: str
    text: str
    run: Run
    system: str = "guarded"
    sends_mib: float = 0.0
    constant_mib: float = _MEMORY_MIB
    is_quick: bool = False

    @property
    def limit_mib(self) -> float:
        """What the server's memory may grow by."""
        return 4 * self.sends_mib + self.constant_mib


CASES: dict[str, Case] = {}


def attack(finding: str, text: str, **fields: Any) -> Callable[[Run], Run]:
    """Makes a function a case."""

    def add(run: Run) -> Run:
        name = getattr(run, "__name__", "")
        assert name not in CASES, name
        CASES[name] = Case(name, finding, text, run, **fields)
        return run

    return add


@dataclass(frozen=True)
class Figures:
    """What the victim measured without and with an attack, in milliseconds, and what the server's memory grew by."""

    calls: int
    failures: Mapping[str, int]
    p50_before_ms: float
    p50_ms: float
    p99_before_ms: float
    p99_ms: float
    max_ms: float
    grown_mib: float

    @property
    def is_late(self) -> bool:
        return self.p99_ms > max(_MAX_RATIO * self.p99_before_ms, self.p99_before_ms + _MAX_MORE_MS)

    def problems(self, case: Case, *, with_latency: bool) -> list[str]:
        """What does not hold."""
        found = [f"the victim lost calls: {dict(self.failures)}"] if self.failures else []
        if self.is_late and with_latency:
            found.append(f"the victim's p99 was {self.p99_before_ms:.0f} ms, and is {self.p99_ms:.0f} ms")
        if self.grown_mib > case.limit_mib:
            found.append(f"the server's memory grew by {self.grown_mib:.0f} MiB, the limit is {case.limit_mib:.0f} MiB")
        return found


@dataclass
class Victim:
    """The victim's process."""

    server: Attacked
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    def __enter__(self) -> Self:
        server = self.server
        given = server.target, server.keys.get(VICTIM, ""), str(server.limit_s), server.asks_for
        words = [sys.executable, "-m", "tests.attack.victim", *given]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._process
        self._process.kill()
        self._process.communicate()

    def measure(self, seconds: float) -> dict[str, Any]:
        assert self._process
        assert self._process.stdin
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process
        assert self._process.stdout
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


async def suffer(case: Case, server: Attacked, victim: Victim, seconds: float, *, with_latency: bool) -> Figures:
    """The figures of an attack. With latency: of several tries, the first whose latency is within its limit, or the
    last; else of one, after a moment in which the server comes to rest.
    """
    for number in range(_TRIES if with_latency else 1):
        before = await asyncio.to_thread(victim.measure, seconds if with_latency else _REST_S)
        server.forget_peak()
        rss_mib = server.rss_mib
        attacking = asyncio.create_task(_attack(case, server))
        try:
            during = await asyncio.to_thread(victim.measure, seconds)
        finally:
            attacking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await attacking
        figures = Figures(
            during["calls"],
            during["failures"],
            before["p50_ms"],
            during["p50_ms"],
            before["p99_ms"],
            during["p99_ms"],
            during["max_ms"],
            max(0.0, server.peak_mib - rss_mib),
        )
        print(f"{case.name}, try {number + 1}: {asdict(figures)}")
        if figures.failures or not figures.is_late:
            break
    return figures


async def _attack(case: Case, server: Attacked) -> None:
    """Attacks again and again. Errors of the attacker are what a server under attack may give it."""
    with _behind_the_victim():
        while True:
            await case.run(server)
            await asyncio.sleep(0)


@contextmanager
def _behind_the_victim() -> Iterator[None]:
    """An attacker has CPUs of its own. Here it takes what the victim leaves, where this process may go back."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, niceness + 10)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


@contextmanager
def _guarded(repository: Path, folder: Path) -> Iterator[Attacked]:
    """`serve all` with both doors and keys."""
    keys, tenants = folder / "keys", folder / "tenants.toml"
    tenants.write_text(_TENANTS)
    given = {tenant: create_key(keys, tenant, tenant) for tenant in (VICTIM, MALLORY)}
    options = ("--api-keys", str(keys), "--tenants", str(tenants), "--default-models", "minilm,classifier")
    with running_http_server(repository, *options) as server:
        yield Attacked(server.process, server.address, given)


SYSTEMS: dict[str, Callable[[Path, Path], "contextlib.AbstractContextManager[Attacked]"]] = {"guarded": _guarded}
