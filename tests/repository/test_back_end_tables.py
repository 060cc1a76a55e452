"""Wings that do not import back ends have tables of their own, by the names of back ends."""

import argparse
from collections.abc import Collection

import pytest

from neuronpipe.cli import accept
from neuronpipe.compiler import compile as compiling
from neuronpipe.compiler import decoders
from neuronpipe.deploy import checks, compose, kubernetes
from neuronpipe.stages.neuron_executor.backends import BACKENDS, GENERATING

# The fake back end is for tests and benchmarks: nothing is installed, deployed or accepted for it.
_REAL = set(BACKENDS) - {"fake"}
_DEVICES = {"neuronx", "torch"}


def _accepted() -> Collection[str]:
    parser = argparse.ArgumentParser()
    accept.add_options(parser)
    (action,) = (action for action in parser._actions if action.dest == "backend")
    return list(action.choices or ())


@pytest.mark.parametrize(
    ("place", "names", "expected"),
    [
        ("compiler/compile.py COMPILERS", compiling.COMPILERS, set(BACKENDS)),
        ("compiler/decoders.py DTYPES", decoders.DTYPES, set(GENERATING)),
        ("deploy/checks.py _PACKAGES", checks._PACKAGES, _REAL),
        ("deploy/checks.py _DEVICES", checks._DEVICES, _DEVICES),
        ("deploy/kubernetes.py _EXECUTORS", kubernetes._EXECUTORS, _REAL),
        ("deploy/compose.py _LAYERS", compose._LAYERS, _DEVICES),
        ("cli/accept.py choices", _accepted(), _REAL),
    ],
)
def test_each_table_has_every_back_end(place: str, names: Collection[str], expected: Collection[str]) -> None:
    assert set(names) == expected, f"{place}: add or remove a line for each back end that differs"
