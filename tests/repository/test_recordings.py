"""What pages and pictures show was printed by the commands that they show, by a server that was not busy."""

import hashlib
import json
import re

import pytest

from tests.documentation import figures
from tests.documentation.chart import Group, Server, chart
from tests.documentation.pages import ROOT, all_pages, fences
from tests.documentation.pictures import TIMES
from tests.documentation.plots import with_dark_colours
from tests.documentation.printed import OutputDiffersError, align, is_same
from tests.documentation.recordings import (
    LOADED,
    MAX_REQUEST_MS,
    TooSlowError,
    record,
    recorded_fences,
    refuse_slow,
    request_times_ms,
)
from tests.documentation.terminal import PICTURE, terminal
from tests.servers.ports import free_port

_WATERFALL = "Infer    all |███    █| {} ms"


@pytest.mark.sampled
@pytest.mark.timeout(600)
def test_pages_show_what_the_commands_print() -> None:
    ports = {shown: f"127.0.0.1:{free_port()}" for shown in ("127.0.0.1:50050", "127.0.0.1:8080")}
    compared = [str(recording.fence) for recording in record(recorded_fences(), ports)]
    assert sorted(compared) == sorted(map(str, recorded_fences()))


def test_no_page_shows_a_request_of_a_busy_server() -> None:
    for page in all_pages():
        for fence in fences(page):
            if fence.recorded != LOADED:
                refuse_slow(fence.content, str(fence))


def test_each_picture_of_a_request_is_of_a_quick_one() -> None:
    times = json.loads(TIMES.read_text())
    assert times.keys() == {"console.png", "terminal.svg", "trace.svg"}
    for name, taken in times.items():
        assert taken["request_ms"] <= MAX_REQUEST_MS, name
        digest = hashlib.sha256((ROOT / "docs" / name).read_bytes()).hexdigest()
        assert digest == taken["sha256"], f"docs/{name} is another picture than that of docs/pictures.json"


def test_the_picture_of_the_terminal_shows_what_the_pages_show() -> None:
    assert PICTURE.read_text(encoding="utf-8") == terminal(), "run: make pictures"


def test_figures_of_pages_and_the_chart_are_those_of_the_results() -> None:
    assert figures.faults() == []


def test_the_chart_shows_servers_that_it_does_not_know_and_cuts_no_text() -> None:
    servers = [Server("neuronpipe", 484, 3.5, is_ours=True), Server("another server, behind a proxy", 1e5, 1e4)]
    note = "Figures of a machine that has a very long name, and that is not in the results. " * 2
    svg = chart([Group("int8", "agreement 0.968", servers)], [note])
    assert "another server, behind a proxy</text>" in svg
    assert "lengthAdjust" in svg
    lines = re.findall(r'<text class="note" x="10"[^>]*>([^<]+)<', svg)
    assert " ".join(lines) == note.strip()
    assert max(map(len, lines)) <= 61  # of 6.4 pixels each, in a picture of 416


@pytest.mark.parametrize(
    ("text", "times_ms"),
    [
        ("answered in 4.12 ms, pre-process 0.31 ms, prediction 3.40 ms", [4.12]),
        (_WATERFALL.format("  4101.341"), [4101.341]),
        ("  preprocess  all |███    █| 30.000 ms", []),
        ('    "total_ns": "31187091",', [31.187091]),
    ],
    ids=["a table", "a waterfall", "a part of a request", "JSON"],
)
def test_the_time_of_a_request_is_found(text: str, times_ms: list[float]) -> None:
    assert request_times_ms(text) == times_ms


def test_a_slow_request_is_refused() -> None:
    refuse_slow(_WATERFALL.format("19.999"), "a page")
    with pytest.raises(TooSlowError, match=re.escape("a page: a request took 20.1 ms, at most 20")):
        refuse_slow(_WATERFALL.format("20.100"), "a page")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("0.3943  Lovely weather.", "0.3951    Lovely weather."),
        ("answered in 4.12 ms", "answered in 11.9 ms"),
        ("made the key 23b44a6ce11a26b8: a.pem", "made the key 77c44a6ce11a2600: a.pem"),
        ("predict  all |███    | 4.1 ms", "predict  all | ██████████████| 4.1 ms"),
        ("SHAPES 8/138", "SHAPES 21/196"),
        ("minilm  1*  …", "minilm  1*  sentence-embedding 8/138"),
        ('{"time": "2026-11-22T10:11:02.549Z"}', '{"time": "2026-12-01T00:00:00.001Z"}'),
    ],
    ids=["a score", "a time", "an id", "a bar", "a count", "the rest of a line", "a date"],
)
def test_lines_of_two_runs_are_the_same(shown: str, printed: str) -> None:
    assert is_same(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("0.3943  Lovely weather.", "0.4143  Lovely weather."),
        ("0.3943  Lovely weather.", "0.3943  Lovely weather!"),
        ("version 1", "version 2"),
        ("longest input 256 tokens", "longest input 512 tokens"),
    ],
    ids=["a score", "a word", "a version", "a limit"],
)
def test_lines_that_say_something_else_differ(shown: str, printed: str) -> None:
    assert not is_same(shown, printed)


def test_an_ellipsis_stands_for_any_lines_and_shown_lines_are_those_of_this_run() -> None:
    printed = ["a", "b 1 ms", "", "c", "d"]
    assert align(["…", "b 7 ms", "…"], printed) == ["…", "b 1 ms", "…"]
    assert align(["a", "b 7 ms", "c", "", "d"], printed) == ["a", "b 1 ms", "c", "", "d"]


@pytest.mark.parametrize("shown", [["a", "c"], ["a", "b"], ["…", "c", "b"], ["…", "e"]], ids=str)
def test_a_line_that_is_left_out_or_not_printed_is_found(shown: list[str]) -> None:
    with pytest.raises(OutputDiffersError):
        align(shown, ["a", "b", "c"])


def test_a_picture_gets_its_dark_colours_once() -> None:
    picture = '<?xml version="1.0"?>\n<svg width="9">\n<rect/>\n</svg>\n'
    dark = with_dark_colours(picture)
    assert dark.index("prefers-color-scheme:dark") < dark.index("<rect/>")
    assert with_dark_colours(dark) == dark


def test_every_picture_of_the_pages_follows_the_colours_of_the_reader() -> None:
    assert [
        one.name for one in (ROOT / "docs").glob("*.svg") if "prefers-color-scheme:dark" not in one.read_text()
    ] == []
