"""What everything but the model costs: a fake back end that takes no time, against a gRPC server that only answers."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from neuronpipe.bundles.manifest import MANIFEST_FILE
from tests.bench.closed_loop import INFER, ClosedLoop, System
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, MODEL, find_repository, make_request, serving_all, serving_echo, serving_four

SECTION = "overhead"
CALLERS = (1, 8, 32, 64)
# `serve all` with room for one request, which never ends: it refuses every other one.
REFUSING = f"{ALL}, refusing"
_FIRST_TOKEN_ID = "101"  # MiniLM's texts begin with it; batches of the warm-up do not have it
_LONGEST_BATCH_S = "3600"


def measure_overhead(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """The systems take turns."""
    repository = find_repository("fake")
    with ExitStack() as stack:
        systems = [
            stack.enter_context(one)
            for one in (
                serving_echo(),
                serving_all(repository),
                serving_four(repository),
                _refusing(repository, make_request(texts[0])),
            )
        ]
        loop = stack.enter_context(ClosedLoop.started([make_request(text) for text in texts]))
        for round in range(rounds):
            for callers in CALLERS:
                for system in systems:
                    found = loop.measure(system, callers, seconds)
                    yield Measurement(section=SECTION, system=system.name, callers=callers, round=round, **vars(found))


@contextmanager
def _refusing(repository: Path, request: bytes) -> Iterator[System]:
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(repository / MODEL, Path(name, MODEL))
        manifest = Path(name, MODEL, "1", MANIFEST_FILE)
        content = json.loads(manifest.read_text())
        content["artifacts"][0]["properties"] = {"endless_token_id": _FIRST_TOKEN_ID}
        manifest.write_text(json.dumps(content))
        options = ("--max-requests-in-flight", "1", "--batch-limit-s", _LONGEST_BATCH_S, "--grace-s", "0")
        with (
            serving_all(Path(name), REFUSING, options) as system,
            grpc.insecure_channel(system.target) as channel,
        ):
            # gRPC cancels a call that nothing refers to.
            endless = channel.unary_unary(INFER, lambda data: data, lambda data: data).future(request)
            yield system
            endless.cancel()
