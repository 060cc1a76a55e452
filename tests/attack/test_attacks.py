"""In every attack the victim loses no call, and the server's memory is bounded.

NEURONPIPE_ATTACK_S: seconds of each measurement. With NEURONPIPE_ATTACK_RECORD, as in `make attack`, the victim's
answers must stay in time, too, and the figures are kept in that file: beside other work, times say nothing.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.attack.cases import CASES, SYSTEMS
from tests.attack.frame import Attacked, Case, Figures, Victim, suffer

pytestmark = [pytest.mark.local_only, pytest.mark.alone]

_SECONDS = float(os.environ.get("NEURONPIPE_ATTACK_S", "1"))
_RECORD = os.environ.get("NEURONPIPE_ATTACK_RECORD")


@pytest.fixture(scope="module")
def attacked(
    http_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], tuple[Attacked, Victim]]]:
    """A system and its victim, by the system's name."""
    running: dict[str, tuple[Attacked, Victim]] = {}
    with ExitStack() as stack:

        def system(name: str) -> tuple[Attacked, Victim]:
            if name not in running:
                server = stack.enter_context(SYSTEMS[name](http_repository, tmp_path_factory.mktemp("attacked")))
                running[name] = server, stack.enter_context(Victim(server))
            return running[name]

        yield system


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, Figures]]:
    """Those of the attacks so far; kept where all were run."""
    found: dict[str, Figures] = {}
    yield found
    if _RECORD and found.keys() == CASES.keys():
        kept = {name: asdict(found[name]) for name in CASES}
        Path(_RECORD).write_text(json.dumps(kept, indent=1) + "\n")


@pytest.mark.timeout(400 + 10 * _SECONDS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.is_quick else pytest.mark.long) for case in CASES.values()],
    ids=lambda case: case.name,
)
async def test_victim_notices_nothing(
    case: Case, attacked: Callable[[str], tuple[Attacked, Victim]], figures: dict[str, Figures]
) -> None:
    server, victim = attacked(case.system)
    found = await suffer(case, server, victim, _SECONDS, with_latency=bool(_RECORD))
    figures[case.name] = found
    assert not found.problems(case, with_latency=bool(_RECORD))
