"""doors/http/console: where it is, and its files and headers."""

import re
from pathlib import Path

import pytest

from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.api.v1.traces_pb2 import GetTraceRequest, GetTraceResponse
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.doors.http.console import pages
from neuronpipe.doors.http.console.pages import console_handlers
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.settings import HttpSettings
from neuronpipe.tasks import TASKS
from tests.servers.door import models_of
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec

_STATIC = Path(pages.__file__).parent / "static"


@pytest.fixture
def browser() -> Browser:
    spec = model_spec(also_answers=("sentence_similarity",))
    browser = Browser([spec], lambda _: TaskResult())
    catalog = Catalog(models_of([spec], Telemetry()))
    browser.app.open([*browser.handlers, *console_handlers(catalog, Meters(), 50050)])
    return browser


@pytest.mark.parametrize(
    ("listen", "console", "has_console"),
    [
        ("127.0.0.1:8080", "auto", True),
        ("127.0.0.2:8080", "auto", True),
        ("[::1]:8080", "auto", True),
        ("localhost:8080", "auto", True),
        ("0.0.0.0:8080", "auto", False),
        ("[::]:8080", "auto", False),
        ("10.0.0.7:8080", "auto", False),
        ("gateway:8080", "auto", False),
        ("", "auto", False),
        ("0.0.0.0:8080", "on", True),
        ("127.0.0.1:8080", "off", False),
    ],
)
def test_it_is_there_on_loopback_unless_told_otherwise(listen: str, console: str, has_console: bool) -> None:
    assert HttpSettings(http_listen=listen, console=console).has_console is has_console


async def test_every_file_is_served_under_a_policy_that_lets_nothing_else_run(browser: Browser) -> None:
    names = sorted(file.name for file in _STATIC.iterdir())
    assert "main.js" in names
    for path in ("/", *(f"/console/{name}" for name in names)):
        status, _ = await browser.get(path)
        assert status == 200, path
        policy = dict(part.strip().split(" ", 1) for part in browser.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == ("'self'",) * 3
        assert browser.headers["x-content-type-options"] == "nosniff"
    status, problem = await browser.get("/console/other.js")
    assert (status, problem["detail"]) == (404, "the console has no such file")


async def test_the_page_of_the_api_runs_its_own_files_alone_and_has_their_licences(browser: Browser) -> None:
    folder = _STATIC.parent / "docs"
    names = {file.name for file in folder.iterdir()}
    assert {"LICENSE.txt", "NOTICE.txt", "swagger-ui-bundle.js.LICENSE.txt"} <= names
    for path in ("/docs", *(f"/docs/{name}" for name in names)):
        status, _ = await browser.get(path)
        assert status == 200, path
        policy = dict(part.strip().split(" ", 1) for part in browser.headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
        assert (policy["style-src"], policy["img-src"]) == ("'self'", "'self' data:")
    html = (folder / "index.html").read_text()
    assert set(re.findall(r'"docs/([^"]+)"', html)) <= names
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)|https?:", html)


def test_the_page_has_no_script_or_style_of_its_own_and_loads_nothing_from_elsewhere() -> None:
    html = (_STATIC / "index.html").read_text()
    assert not re.search(r"<style|\bstyle=|\bon\w+=|<script(?![^>]*\bsrc=)", html)
    for file in _STATIC.iterdir():
        addresses = set(re.findall(r"https?://[^\s\"'`]*", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name


def test_every_file_that_a_file_names_is_there() -> None:
    for file in _STATIC.iterdir():
        text = file.read_text()
        named = re.findall(r'"console/([\w.]+\.\w+)"', text) + re.findall(r'from "\./([\w.]+)"', text)
        assert [name for name in named if not (_STATIC / name).is_file()] == []


async def test_the_state_has_the_models_and_the_port_of_grpc(browser: Browser) -> None:
    _, state = await browser.get("/console/state")
    assert state["grpc_port"] == 50050
    (model,) = state["models"]
    assert (model["name"], model["tasks"]) == ("small", ["text_classification", "sentence_similarity"])


async def test_a_kept_trace_is_what_the_trace_service_finds(browser: Browser) -> None:
    async def get_trace(request: GetTraceRequest) -> GetTraceResponse:
        return GetTraceResponse(otlp_json=f'{{"asked": "{request.trace_id}"}}')

    status, problem = await browser.get("/console/traces/abc")
    assert (status, problem["detail"]) == (404, "the server keeps no traces (kept_traces)")
    browser.app.open(console_handlers(Catalog(models_of([], Telemetry())), Meters(), 1, get_trace))
    assert await browser.get("/console/traces/abc") == (200, {"asked": "abc"})
    _, state = await browser.get("/console/state")
    assert state["keeps_traces"] is True


async def test_the_hugging_face_endpoint_keeps_its_path(browser: Browser) -> None:
    status, _ = await browser.post("/", {"inputs": ""})
    assert status != 405


async def test_every_task_has_a_sample_and_a_way_to_show_its_result(browser: Browser) -> None:
    _, state = await browser.get("/console/state")
    assert TASKS.keys() <= state["samples"].keys()
    source = (_STATIC / "tasks.js").read_text().partition("const SHOWN = {")[2]
    fields = {getattr(TaskResult(), task).DESCRIPTOR.fields[0].name for task in TASKS}
    assert {*re.findall(r"^  (\w+): ", source, re.MULTILINE)} == fields
