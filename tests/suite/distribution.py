"""Distributes the tests among the workers of pytest-xdist: by files, whose tests share fixtures, longest files first.

pytest-xdist's own --dist loadgroup does not see groups with pytest 9.2.
"""

from pathlib import PurePosixPath
from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Folders of tests/ in their order. Unit tests, some of which look at the clock, run when little else does.
_ORDER = ("contract", "repository", "attack", "integration", "interop", "oracle", "unit")
# In these files, tests share fixtures only where they have the same parameters.
_BY_PARAMETERS = (
    "tests/attack/test_expansion.py",
    "tests/contract/test_architectures.py",
    "tests/unit/stages/neuron_executor/test_scheduler_fuzz.py",
)
# Files whose tests ask the same servers over the openvino models, which take 4 s of CPU time to start.
_SAME_SERVERS = {f"tests/integration/doors/test_{name}.py" for name in ("behaviour", "client", "node", "oip", "wire")}


def part_of(nodeid: str) -> str:
    """Names the group of tests that a single worker runs."""
    file, _, test = nodeid.partition("::")
    if file in _SAME_SERVERS:
        return "servers over the openvino models"
    return f"{file}[{test.partition('[')[2]}" if file in _BY_PARAMETERS else file


def order_of(nodeid: str) -> int:
    """Returns a smaller number for tests that begin earlier."""
    folder = PurePosixPath(nodeid.partition("::")[0]).parts[1]
    return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)


class Scheduling(LoadScopeScheduling):
    """Hands out the parts in the order of the collected tests."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)
