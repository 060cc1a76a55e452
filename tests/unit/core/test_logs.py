"""core/logs.py: one JSON object a line on standard error. Run in a process of its own, since it takes over the
process's logging.
"""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import start_logging

_PROGRAM = """
import logging
from neuronpipe.core.logs import log, log_fault, log_warning, start_logging

start_logging("tokenizer")
log("ready", address="127.0.0.1:1", models=2)
log_warning("odd", path=__import__("pathlib").Path("/x"))
try:
    raise ValueError("line one\\nline two")
except ValueError as fault:
    log_fault("broken", fault, model="m")
logging.getLogger("some.library").info("chatter")
from neuronpipe.core.tracing import Span, SpanContext, enter_span
enter_span(Span("request", SpanContext(0xA, 0xB, is_sampled=True), None, 0))
log("within a request")
enter_span(None)
logging.getLogger("some.library").warning("attention")
"""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    process = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert process.stdout == ""
    return [json.loads(line) for line in process.stderr.splitlines()]


def test_a_line_has_time_level_service_event_and_fields(lines: list[dict[str, Any]]) -> None:
    line = lines[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    fields = {"address": "127.0.0.1:1", "models": 2}
    assert line == {"time": line["time"], "level": "info", "service": "tokenizer", "event": "ready", **fields}


def test_a_field_that_json_does_not_have_is_written_as_text(lines: list[dict[str, Any]]) -> None:
    assert (lines[1]["level"], lines[1]["path"]) == ("warning", "/x")


def test_a_fault_is_one_line_with_its_traceback(lines: list[dict[str, Any]]) -> None:
    assert lines[2]["level"] == "error"
    assert "ValueError: line one\nline two" in lines[2]["exception"]


def test_of_libraries_only_warnings_are_logged(lines: list[dict[str, Any]]) -> None:
    assert [(line["event"], line["service"]) for line in lines[4:]] == [("attention", "tokenizer")]


def test_a_line_within_a_sampled_request_names_its_trace_and_span(lines: list[dict[str, Any]]) -> None:
    assert lines[3]["event"] == "within a request"
    assert (lines[3]["trace_id"], lines[3]["span_id"]) == (f"{0xA:032x}", f"{0xB:016x}")
    assert not any("trace_id" in line for line in (*lines[:3], *lines[4:]))


@pytest.mark.parametrize(
    ("lines", "is_front", "expected"),
    [
        ("", False, ["change", "warning"]),
        ("changes", False, ["change", "warning"]),
        ("warnings", False, ["warning"]),
        ("requests", False, ["change", "warning", "request"]),
        ("requests", True, ["warning", "request"]),
    ],
)
def test_the_log_has_the_lines_that_are_asked_for(lines: str, is_front: bool, expected: list[str]) -> None:
    program = (
        "from neuronpipe.core.logs import log, log_request, log_warning, start_logging\n"
        f"start_logging('all', {lines!r}, is_front={is_front})\n"
        "log('change'); log_warning('warning'); log_request(status='OK')\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["event"] for line in process.stderr.splitlines()] == expected


def test_lines_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(SetupError, match=r"^NEURONPIPE_LOG: 'debug' must be one of warnings, changes, requests$"):
        start_logging("all", "debug")
