"""Names of traces and metrics: each is used, and the page, the dashboard and the alerts know no others."""

import re
from pathlib import Path

import pytest

import neuronpipe
from neuronpipe.core.names import Attributes, Events, Instrument, Metrics, Name, Spans, instruments, names_in
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE
from tests.contract.telemetry_page import document

_ROOT = Path(neuronpipe.__file__).parent
_DOCS = Path(__file__).parents[2] / "docs"


# Of the stages' rpcs, which their protos name (rpc/items.py).
_OF_PROTOS = ["Spans.TOKENIZE_RPC", "Spans.EXECUTE_RPC", "Spans.POSTPROCESS_RPC"]


def test_every_name_is_used() -> None:
    sources = "\n".join(file.read_text() for file in _ROOT.rglob("*.py"))
    groups = (Spans, Attributes, Events, Metrics)
    names = [
        f"{group.__name__}.{word}"
        for group in groups
        for word, value in vars(group).items()
        if isinstance(value, Name | Instrument)
    ]
    assert [name for name in names if not re.search(rf"\b{name}\b", sources)] == _OF_PROTOS


def test_the_stages_rpcs_are_named_as_their_protos_name_them() -> None:
    assert [rpc.path.removeprefix("/") for rpc in (TOKENIZE, EXECUTE, POSTPROCESS)] == [
        Spans.TOKENIZE_RPC,
        Spans.EXECUTE_RPC,
        Spans.POSTPROCESS_RPC,
    ]


@pytest.mark.parametrize(
    "names",
    [
        [str(name) for group in (Spans, Attributes, Events) for name in names_in(group)],
        [one.name for one in instruments()],
    ],
)
def test_no_two_things_have_one_name(names: list[str]) -> None:
    assert len(names) == len(set(names))


def test_the_page_is_what_the_names_say() -> None:
    assert (_DOCS / "telemetry.md").read_text() == document(), "run: make fix-telemetry"
