"""Names of traces and metrics: each is used, and the page, the dashboard and the alerts know no others."""

import re
from pathlib import Path

import pytest

import neuronpipe
from neuronpipe.core.names import Attributes, Events, Instrument, Metrics, Name, Spans, instruments
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE
from tests.reference import telemetry

_ROOT = Path(neuronpipe.__file__).parent

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
    used = set(re.findall(r"\b\w+\.\w+\b", sources))
    assert [name for name in names if name not in used] == _OF_PROTOS


def test_the_stages_rpcs_are_named_as_their_protos_name_them() -> None:
    paths = [rpc.path.removeprefix("/") for rpc in (TOKENIZE, EXECUTE, POSTPROCESS)]
    assert paths == [Spans.TOKENIZE_RPC, Spans.EXECUTE_RPC, Spans.POSTPROCESS_RPC]


@pytest.mark.parametrize(
    "names",
    [
        [str(name) for group in (Spans, Attributes, Events) for name in telemetry.names_in(group)],
        [instrument.name for instrument in instruments()],
    ],
)
def test_no_two_things_have_one_name(names: list[str]) -> None:
    assert len(names) == len(set(names))


@pytest.mark.parametrize("where", telemetry.queries())
def test_a_query_names_series_and_labels_that_exist(where: str) -> None:
    assert [*telemetry.faults_of_query(telemetry.queries()[where])] == []


def test_pages_dashboard_and_manifests_name_what_is_declared_and_show_all_of_it() -> None:
    assert [*telemetry.faults()] == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(rate(neuronpipe_request_tokens[5m]))", "neuronpipe_request_tokens is no series"),
        ("sum by (neuronpipe_stage) (neuronpipe_cores)", "neuronpipe_stage is no label of its series"),
        ('neuronpipe_cores{neuronpipe_core="0"}', "neuronpipe_core is no label of its series"),
        ("up", "names no series"),
    ],
)
def test_a_query_of_what_is_not_there_is_found(query: str, fault: str) -> None:
    assert [*telemetry.faults_of_query(query)] == [fault]
