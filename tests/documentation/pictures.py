"""Takes the pictures of the pages from a running system: `make pictures`, or
`python -m tests.documentation.pictures REPOSITORY`.

The repository is that of `make demo`. First recordings.py writes the output that pages show, of which docs/terminal.svg
is made. Chromium opens the console and sends a request; docs/console.png is the whole page with its answer.
docs/trace.svg is a request through four processes while others call them, with what its spans mean.

Servers are warm, and the machine must be idle: a picture whose request took more than MAX_REQUEST_MS is taken again,
and after some tries refused. docs/pictures.json has the time of each; tests/repository/test_recordings.py checks it.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import Client
from neuronpipe.measure.waterfall import Trace, WaterfallRow, read_trace, sample
from tests.documentation.pages import ROOT
from tests.documentation.plots import with_dark_colours
from tests.documentation.recordings import MAX_REQUEST_MS, TooSlowError, record_pages, request_times_ms
from tests.documentation.terminal import PICTURE, terminal

_TRACED = ("--kept-traces", "100")
_OPTIONS = ("--http-listen", "127.0.0.1:0", *_TRACED)
_SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}
# Requests share batches, and a request still takes a few milliseconds.
_CALLERS = 8
_WARM_UP, _TRIES = 100, 30
# Requests of the console until the process is warm, and the time after each, in which the page draws.
_SENT, _PAUSE_MS = 20, 300
_ANSWERED = re.compile(r"answered in ([\d.]+) ms")
TIMES = ROOT / "docs" / "pictures.json"
# The meaning of a span, beside its bar in docs/trace.svg.
_MEANINGS = {
    "Infer": "the request, at the gateway",
    "preprocess": "the gateway's view: the stage and the way to it",
    "Tokenize": "the tokenizer's own work",
    "predict": "the gateway's view",
    "Execute": "in the executor's process",
    "predict.queue": "waits for a core",
    "predict.compute": "computes, in a batch",
    "postprocess": "the gateway's view",
    "Postprocess": "the postprocessor's own work",
}
_COLOURS = {
    "preprocess": "#f58518",
    "Tokenize": "#f58518",
    "predict": "#54a24b",
    "Execute": "#54a24b",
    "predict.queue": "#9ecae9",
    "predict.compute": "#eeca3b",
    "postprocess": "#b279a2",
    "Postprocess": "#b279a2",
}
_LEFT, _WIDTH, _ROW = 290, 560, 26


def save(picture: str, content: bytes, request_ms: float) -> None:
    """Writes a picture, and records the time of the request that it shows, and which file it is. Raises TooSlowError,
    and writes nothing, where the request was slow.
    """
    if request_ms > MAX_REQUEST_MS:
        raise TooSlowError(
            f"{picture}: the request took {request_ms:.1f} ms, at most {MAX_REQUEST_MS:.0f}: is it idle?"
        )
    (ROOT / "docs" / picture).write_bytes(content)
    times = json.loads(TIMES.read_text()) if TIMES.is_file() else {}
    times[picture] = {"request_ms": round(request_ms, 3), "sha256": hashlib.sha256(content).hexdigest()}
    TIMES.write_text(json.dumps(dict(sorted(times.items())), indent=1) + "\n")


def draw_trace(repository: str) -> None:
    """Writes docs/trace.svg."""
    with (
        four_processes(repository, *_TRACED, environment=_SAMPLED) as processes,
        tempfile.TemporaryDirectory() as folder,
        Client(target := processes["gateway"].target) as client,
    ):
        for _ in range(_WARM_UP):
            client.embed("minilm", "A fine day for a walk.")
        for _ in range(_TRIES):
            found = _sample_under_load(target, client, Path(folder) / "spans.json")
            trace = read_trace(found, _trace_of(found))
            shares_batch = trace and any(len(trace.mates(batch)) > 1 for batch in trace.batches)
            if trace and shares_batch and trace.root.duration_ns <= MAX_REQUEST_MS * 1e6:
                break
    assert trace
    picture = with_dark_colours("\n".join(_svg(trace))) + "\n"
    save("trace.svg", picture.encode(), trace.root.duration_ns / 1e6)


def _sample_under_load(target: str, client: Client, spans: Path) -> dict[str, Any]:
    """The spans of a request that others accompany, as OTLP JSON."""
    text = SentenceEmbeddingInput(text="A fine day for a walk along the river.")
    request = InferRequest(model="minilm", input=TaskInput(sentence_embedding=text))
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            client.embed("minilm", "A fine day for a walk.")

    callers = [threading.Thread(target=call) for _ in range(_CALLERS)]
    for caller in callers:
        caller.start()
    try:
        sample(request, target, timeout_s=30, warm_up=20, otlp=spans)
    finally:
        ended.set()
        for caller in callers:
            caller.join()
    found: dict[str, Any] = json.loads(spans.read_text())
    return found


def _trace_of(spans: dict[str, list[dict[str, list[dict[str, list[dict[str, str]]]]]]]) -> str:
    """The id of the request's trace; the others are of its batches."""
    names = {
        span["traceId"]: span for of in spans["resourceSpans"] for scope in of["scopeSpans"] for span in scope["spans"]
    }
    return next(trace_id for trace_id, span in names.items() if span["name"] != "batch")


def _svg(trace: Trace) -> Iterator[str]:
    """The waterfall of a request, below it the batch that it ran in, and an arrow for the link between them."""
    rows = [*trace.rows, *(WaterfallRow(batch, 0) for batch in trace.batches)]
    width, height = _LEFT + _WIDTH + 90, (len(rows) + 1) * _ROW + 12
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui,sans-serif" font-size="12" role="img">'
    )
    yield "<title>A request through four processes, and the batch that it ran in</title>"
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    yield (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#c33"/></marker>'
    )
    scale = _WIDTH / trace.root.duration_ns
    places: dict[str, tuple[float, float, int]] = {}
    for number, row in enumerate(rows):
        span, y = row.span, _ROW * (number + (number >= len(trace.rows)))
        name = span.name.rpartition("/")[2]
        begin = _LEFT + max(0, span.started_ns - trace.root.started_ns) * scale
        length = max(2, span.duration_ns * scale)
        places[name] = (begin, length, y)
        yield f'<text x="{12 + 14 * row.depth}" y="{y + 23}" fill="#222">{escape(name)}</text>'
        yield f'<text x="180" y="{y + 23}" fill="#666">{escape(span.service)}</text>'
        colour = _COLOURS.get(name, "#7aa6d1")
        yield f'<rect x="{begin:.1f}" y="{y + 11}" width="{length:.1f}" height="16" rx="2" fill="{colour}"/>'
        yield f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 23}" fill="#222">{span.duration_ns / 1e6:.3f} ms</text>'
        yield from _note(
            _MEANINGS.get(name, _texts(len(trace.mates(span))) if name == "batch" else ""),
            begin,
            length,
            y,
        )
    if "batch" in places:
        (begin, _, y), (_, _, below) = places["predict.compute"], places["batch"]
        path = f"M{begin + 20:.1f} {y + 27}V{below + 10}"
        yield f'<path d="{path}" stroke="#c33" stroke-width="1.5" fill="none" marker-end="url(#head)"/>'
        text = "the link of predict.compute leads to the batch, a trace of its own"
        x, anchor = (begin + 30, "start") if begin < _LEFT + _WIDTH / 4 else (begin + 10, "end")
        yield f'<text x="{x:.1f}" y="{below - 3}" fill="#c33" text-anchor="{anchor}">{text}</text>'
    yield "</svg>"


def _texts(count: int) -> str:
    """The texts of a batch, one of which is of the request."""
    others = "one is of another request" if count == 2 else f"{count - 1} are of other requests"
    return f"{count} texts; {others}" if count > 1 else "1 text"


def _note(text: str, begin: float, length: float, y: int) -> Iterator[str]:
    """The meaning of a span: in its bar if it has room, else beside it with an arrow."""
    room = 6.4 * len(text)
    right = begin + length
    if length > room + 10:
        yield f'<text x="{begin + 8:.1f}" y="{y + 23}" fill="#111">{escape(text)}</text>'
    elif right + room + 30 < _LEFT + _WIDTH:
        yield _arrow(right + 24, right + 3, y)
        yield f'<text x="{right + 28:.1f}" y="{y + 23}" fill="#c33">{escape(text)}</text>'
    else:
        yield _arrow(begin - 24, begin - 3, y)
        yield f'<text x="{begin - 28:.1f}" y="{y + 23}" fill="#c33" text-anchor="end">{escape(text)}</text>'


def _arrow(start: float, end: float, y: int) -> str:
    return f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y + 19}" y2="{y + 19}" stroke="#c33" marker-end="url(#head)"/>'


def take_picture(repository: str) -> None:
    """Writes docs/console.png."""
    with ServiceProcess("all", "--repository", repository, *_OPTIONS) as process, _page() as page:
        process.wait_until_ready()
        page.goto(f"http://{process.wait_for('listening for HTTP')['address']}/")
        for _ in range(_SENT):
            request_ms = _send_similarity(page)
        for _ in range(_TRIES):
            if request_ms <= MAX_REQUEST_MS:
                break
            request_ms = _send_similarity(page)
        page.evaluate("scrollTo(0, 0)")  # the page's head stays in view, and would cover what is below it
        picture = page.screenshot(full_page=True)
    save("console.png", picture, request_ms)


@contextmanager
def _page() -> Iterator[Page]:
    """A window of Chromium."""
    program = shutil.which("chromium")
    assert program, "make chromium installs it"
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")


def _send_similarity(page: Page) -> float:
    """Sends the sample of sentence-similarity; the time of the request, in ms."""
    form = page.get_by_role("form", name="Request")
    form.get_by_role("combobox", name="Model").select_option("minilm")
    form.get_by_role("combobox", name="Task").select_option("sentence_similarity")
    status = page.get_by_role("region", name="Answer").get_by_role("status")
    page.get_by_role("button", name="Send").click()
    expect(status).to_contain_text("answered in")
    page.wait_for_timeout(_PAUSE_MS)
    [request_ms] = _ANSWERED.findall(status.inner_text())
    return float(request_ms)


def _draw_terminal() -> None:
    """Writes docs/terminal.svg."""
    record_pages()
    picture = terminal()
    save(PICTURE.name, picture.encode(), max(request_times_ms(picture)))


if __name__ == "__main__":
    _draw_terminal()
    take_picture(sys.argv[1])
    draw_trace(sys.argv[1])
