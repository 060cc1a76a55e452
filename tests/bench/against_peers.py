"""Other serving systems with the same model on the same texts, each beside `serve all`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tests.bench.closed_loop import ClosedLoop
from tests.bench.measurements import Measurement
from tests.bench.models import of_dtype
from tests.bench.peers.running import PEERS, PeerResult, PeerUnavailable, running_peer
from tests.bench.systems import ALL, computed_dtypes, find_repository, make_request, serving_all

SECTION = "peers"
CALLERS = (1, 32)
# Which of them is better depends on the machine and on the callers: both are measured.
_ONE_THREAD = ("--threads", "1", "--workers", "2")
_TWO_THREADS = ("--threads", "2", "--workers", "1")
_SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = dict.fromkeys(
    ("litserve", "ray", "triton"), (_ONE_THREAD, _TWO_THREADS)
)
_SETTLE_S = 0.5


def measure_peers(
    peers: Sequence[str], texts: Sequence[str], rounds: int, seconds: float, unavailable: dict[str, str]
) -> Iterator[Measurement]:
    """A peer and ours take turns while the peer runs, stopped while it is not its turn; then the next peer comes.

    Notes the reason of each peer that cannot be measured in `unavailable`. A round's number holds for one peer with one
    setting.
    """
    with ExitStack() as stack:
        ours = [
            stack.enter_context(serving_all(find_repository(dtype), of_dtype(ALL, dtype)))
            for dtype in computed_dtypes()
        ]
        loop = stack.enter_context(ClosedLoop.started([make_request(text) for text in texts]))
        first = 0
        for name in peers:
            for settings in _SETTINGS.get(name, ((),)):
                system = " ".join((name, *settings))
                try:
                    with running_peer(name, texts, settings) as peer:
                        for round in range(first, first + rounds):
                            for callers in CALLERS:
                                yield _measurement(system, round, peer.measure(callers, seconds))
                                with peer.paused():
                                    for one in ours:
                                        found = loop.measure(one, callers, seconds)
                                        yield Measurement(
                                            section=SECTION,
                                            system=one.name,
                                            callers=callers,
                                            round=round,
                                            **vars(found),
                                        )
                                time.sleep(_SETTLE_S)
                except PeerUnavailable as error:
                    unavailable[system] = error.reason
                first += rounds


def _measurement(system: str, round: int, found: PeerResult) -> Measurement:
    return Measurement(
        section=SECTION,
        system=system,
        callers=found.callers,
        round=round,
        throughput_per_s=found.throughput_per_s,
        errors=found.errors,
        latencies_ms={"p50": found.p50_ms, "p90": found.p90_ms, "p99": found.p99_ms},
    )


ALL_PEERS = tuple(PEERS)
