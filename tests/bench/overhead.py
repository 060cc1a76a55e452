"""What everything but the model costs: a fake back end that takes no time, against a gRPC server that only answers."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from tests.bench.load import GRPCIO, INFER, LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.systems import (
    ALL,
    ECHO_SERVER,
    FOUR,
    MODEL,
    OUR_ECHO,
    find_repository,
    make_request,
    serving_all,
    serving_echo,
    serving_four,
    take_turns,
    with_tls,
)
from tests.models.versions import copy_bundle
from tests.suite.constants import constants

SECTION = "overhead"
# `serve all` with room for one request, which never ends: it refuses every other one.
REFUSING = f"{ALL}, refusing"
_BY_GRPCIO = ", called by grpcio"
# The numbers of callers of each system, by our light client; and by grpcio, to check the former.
_CALLERS = {
    ECHO_SERVER: (1, 8, 32, 64),
    OUR_ECHO: (1, 32),
    ALL: (1, 8, 32, 64),
    FOUR: (1, 8, 32, 64),
    REFUSING: (32,),
    with_tls(ECHO_SERVER): (1, 32),
    with_tls(OUR_ECHO): (1, 32),
}
_CALLERS_BY_GRPCIO = dict.fromkeys((ECHO_SERVER, ALL, FOUR), (1, 32, 64))
_FIRST_TOKEN_ID = "101"  # MiniLM's texts begin with it; batches of the warm-up do not have it
_LONGEST_BATCH_S = 3600.0


def reference_of(system: str) -> str:
    """The echo server of grpc.aio that a system is compared with: called in the same way."""
    if system.endswith(_BY_GRPCIO):
        return by_grpcio(ECHO_SERVER)
    return with_tls(ECHO_SERVER) if system == with_tls(OUR_ECHO) else ECHO_SERVER


def by_grpcio(system: str) -> str:
    """The name of a system that grpcio calls."""
    return f"{system}{_BY_GRPCIO}"


def measure_overhead(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """The systems take turns."""
    repository = find_repository("fake")
    with ExitStack() as stack:
        systems = [
            stack.enter_context(system)
            for system in (
                serving_echo(),
                serving_echo(OUR_ECHO),
                serving_all(repository),
                serving_four(repository),
                _refusing(repository, make_request(texts[0])),
                serving_echo(has_tls=True),
                serving_echo(OUR_ECHO, has_tls=True),
            )
        ]
        turns = [(callers, system) for system in systems for callers in _CALLERS[system.name]]
        turns += [
            (callers, replace(system, name=by_grpcio(system.name), client=GRPCIO))
            for system in systems
            for callers in _CALLERS_BY_GRPCIO.get(system.name, ())
        ]
        # Those that are compared follow each other.
        turns.sort(key=lambda turn: (turn[1].client == GRPCIO, turn[0]))
        loop = stack.enter_context(LoadProcess.started([make_request(text) for text in texts]))
        yield from take_turns(SECTION, loop, turns, range(rounds), seconds)


@contextmanager
def _refusing(repository: Path, request: bytes) -> Iterator[System]:
    with tempfile.TemporaryDirectory() as name:
        copy_bundle(repository, MODEL, Path(name), {"endless_token_id": _FIRST_TOKEN_ID})
        options = ("--max-requests-in-flight", "1", "--grace-s", "0")
        with (
            serving_all(Path(name), REFUSING, options, constants(batch_limit_s=_LONGEST_BATCH_S)) as system,
            grpc.insecure_channel(system.target) as channel,
        ):
            # gRPC cancels a call that nothing refers to.
            endless = channel.unary_unary(INFER, lambda data: data, lambda data: data).future(request)
            try:
                yield system
            finally:
                endless.cancel()
