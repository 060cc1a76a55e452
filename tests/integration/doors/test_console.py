"""The console in a real Chromium: forms of all tasks, calls to copy, keyboard, colours, the policy, live figures."""

import asyncio
import json
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright, expect

from demo.processes import four_processes
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import Operation, Signed
from neuronpipe.client import AsyncClient
from neuronpipe.tasks import TASKS
from tests.integration.doors.test_node import FOLDER as NODE
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.images import make_image_text_source
from tests.models.versions import copy_classifier
from tests.suite.constants import constants
from tests.suite.shared_folder import shared_folder
from tests.systems.guarded_gateway import guarded_server, make_files
from tests.systems.http_server import HttpServer, running_http_server
from tests.systems.pipelines import UNPREPARED

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_AXE = NODE / "node_modules" / "axe-core" / "axe.min.js"
# Of each task, a model of the tests, and what a readable result of its sample has.
_SHOWN = {
    "text_classification": ("classifier", r"(calm|busy|lost|found)\s*\d+\.\d\xa0%"),
    "sentence_embedding": ("minilm", r"384 dimensions, length 1\.0000: \["),
    "question_answering": ("answerer", r"Ada Lovelace lived in London\..*\d\xa0%"),
    "token_classification": ("tagger", r"(PER|LOC): \w+|Nothing found"),
    "fill_mask": ("filler", r"Paris is the .* of France\..*\d\xa0%"),
    "feature_extraction": ("extractor", r"\d+ × 32 numbers: a vector for each token"),
    "sentence_similarity": ("minilm", r"A kitten was curled up on the rug\.\s*\d+"),
    "rerank": ("reranker", r"The cat slept on the mat all afternoon\.\s*\d+"),
    "zero_shot_classification": ("entailer", r"(sport|politics|cooking)\s*\d+\.\d\xa0%"),
    "image_classification": ("viewer", r"(contradiction|neutral|entailment)\s*\d+\.\d\xa0%"),
}
# The same of tasks that the fake back end has none of.
_SHOWN_BY_OPENVINO = {
    "text_generation": ("continuer", r"Ended by: length"),
    "summarization": ("summarizer", r"Ended by: (length|end)"),
    "translation": ("translator", r"Ended by: (length|end)"),
    "sparse_embedding": ("expander", r"and \d+ more"),
    "multi_vector_embedding": ("retriever", r"\d+ × 16 numbers: a vector for each token"),
    "image_embedding": ("matcher", r"24 dimensions, length 1\.0000"),
    "zero_shot_image_classification": ("matcher", r"a (cat|dog|bicycle)\s*\d+\.\d\xa0%"),
}
_RUN_LIMIT_S = 60
_SIGNED = Signed("ann")


@dataclass
class Console:
    """A window, and what it asked for and complained of."""

    page: Page
    url: str
    requested: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)

    async def open(self) -> None:
        self.page.on("request", lambda request: self.requested.add(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        await self.page.goto(f"{self.url}/")
        await expect(self.page.get_by_role("status").filter(has_text="live")).to_be_visible()

    async def choose(self, model: str, task: str) -> None:
        form = self.page.get_by_role("form", name="Request")
        await form.get_by_role("combobox", name="Model").select_option(model)
        await form.get_by_role("combobox", name="Task").select_option(task)
        if "image" in task:
            await self.page.get_by_role("button", name="Use a sample picture").click()
            await expect(self.page.get_by_alt_text("The picture that is sent")).to_be_visible()

    async def send(self) -> None:
        await self.page.get_by_role("button", name="Send").click()
        await expect(self.answer.get_by_role("status")).to_have_text(re.compile("answered in|failed"))

    @property
    def answer(self) -> Any:
        return self.page.get_by_role("region", name="Answer")

    @property
    def code(self) -> Any:
        return self.page.locator("#code")

    async def response(self) -> Any:
        """The response as JSON, as the page shows it."""
        return json.loads(await self.answer.locator("pre").text_content())


@pytest_asyncio.fixture(scope="module")
async def chromium() -> AsyncIterator[Browser]:
    program = shutil.which("chromium")
    assert program, "make chromium installs it"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program)
        yield browser
        await browser.close()


@asynccontextmanager
async def _opened(chromium: Browser, url: str, **options: Any) -> AsyncIterator[Console]:
    context = await chromium.new_context(**options)
    console = Console(await context.new_page(), url)
    try:
        await console.open()
        yield console
    finally:
        await context.close()


@pytest_asyncio.fixture
async def console(chromium: Browser, http_server: HttpServer) -> AsyncIterator[Console]:
    async with _opened(chromium, http_server.url) as console:
        yield console


def test_every_shape_of_a_result_is_tried() -> None:
    tried = _SHOWN.keys() | _SHOWN_BY_OPENVINO.keys()
    shapes = [{getattr(TaskResult(), task).DESCRIPTOR.fields[0].name for task in tasks} for tasks in (TASKS, tried)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("task", _SHOWN)
async def test_a_form_sends_a_request_and_shows_its_result_its_timings_and_its_batch(
    console: Console, task: str
) -> None:
    model, shown = _SHOWN[task]
    await console.choose(model, task)
    await console.send()
    text = await console.answer.inner_text()
    assert re.search(shown, text, re.DOTALL), text
    rows = console.page.get_by_role("table", name="Where the time went").get_by_role("row")
    ticks = [float(tick) for tick in await rows.nth(0).locator(".ticks span").all_inner_texts()]
    assert len(ticks) >= 3
    assert f"{ticks[1]:e}"[:2] in ("1.", "2.", "3.", "5."), "a round step"
    assert ticks == pytest.approx([tick * ticks[1] for tick in range(len(ticks))], rel=0.01)
    assert [await row.get_by_role("rowheader").inner_text() for row in (await rows.all())[1:]] == [
        *("http.request", "preprocess", "predict", "predict.queue", "predict.compute", "postprocess")
    ]
    response = await console.response()
    assert (await rows.nth(1).inner_text()).split()[1] == f"{int(response['timings']['total_ns']) / 1e6:.3f}"
    facts = dict(re.findall(r"(Batch size|Bucket|Token cache|Result cache)\n(.+)", text))
    assert facts["Bucket"] == f"{response['usage']['bucket_tokens']} tokens"
    assert facts["Token cache"] in ("miss", "hit in memory")
    assert facts["Result cache"] == "not used"
    assert list(response["result"]) == [task]
    assert console.complaints == []
    assert {url for url in console.requested if not url.startswith((f"{console.url}/", "blob:"))} == set()


def _make_openvino_models(folder: Path, writers: Path) -> None:
    shutil.copytree(writers / "repository", folder / "repository")
    sources = (
        ("expander", "sparse_embedding", make_source(folder / "expander", "BERT", "sparse_embedding")),
        ("retriever", "multi_vector_embedding", make_source(folder / "retriever", "BERT", "multi_vector_embedding")),
        ("matcher", "", make_image_text_source(folder / "matcher", "CLIP", max_tokens=48)),
    )
    for name, task, source in sources:
        compile_model(source, folder / "repository", task, name=name)


@pytest.fixture(scope="module")
def openvino_server(writers_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    models = shared_folder(
        tmp_path_factory, "console-models", lambda folder: _make_openvino_models(folder, writers_folder)
    )
    with running_http_server(models / "repository", "--kept-traces", "100", environment=UNPREPARED) as server:
        yield server


@pytest.mark.parametrize("task", _SHOWN_BY_OPENVINO)
async def test_a_form_of_tasks_that_need_a_real_model_shows_its_result(
    chromium: Browser, openvino_server: HttpServer, task: str
) -> None:
    model, shown = _SHOWN_BY_OPENVINO[task]
    async with _opened(chromium, openvino_server.url) as console:
        await console.choose(model, task)
        await console.send()
        text = await console.answer.inner_text()
        assert re.search(shown, text), text
        assert list((await console.response())["result"]) == [task]
        assert console.complaints == []


async def test_a_chat_is_shown_as_it_comes_with_the_times_of_its_tokens(
    chromium: Browser, openvino_server: HttpServer
) -> None:
    async with _opened(chromium, openvino_server.url) as console:
        await console.choose("writer", "text_generation")
        chat = console.page.get_by_role("textbox", name="Messages")
        assert (await chat.input_value()).splitlines() == ["system: Be brief.", "user: What is a module?"]
        await chat.fill("user: What is\na module?")
        await console.page.get_by_role("spinbutton", name="Max new tokens").fill("150")
        # Each state of the text that is shown, on its way.
        await console.page.evaluate(
            """() => {
              window.shown = new Set();
              const watch = () => window.shown.add(document.querySelector(".coming")?.textContent);
              const answered = document.getElementById("answered");
              new MutationObserver(watch).observe(answered, { childList: true, subtree: true });
            }"""
        )
        await console.send()
        parts = [part for part in await console.page.evaluate("[...window.shown]") if part]
        response = await console.response()
        async with AsyncClient(openvino_server.process.target, timeout_s=60) as client:
            messages = [{"role": "user", "content": "What is\na module?"}]
            whole = (await client.generate_text("writer", messages=messages, max_new_tokens=150)).text
        assert await console.answer.locator(".written").text_content() == whole
        assert len(parts) > 1
        assert all(whole.startswith(part) for part in parts)
        facts = dict(re.findall(r"(First token|Longest gap|Tokens|Steps)\n(.+)", await console.answer.inner_text()))
        assert facts["First token"] == f"{int(response['timings']['first_token_ns']) / 1e6:.1f}\xa0ms"
        assert facts["Tokens"] == f"{response['usage']['tokens']} + 150"
        assert "A step of 1 on openvino: " in await console.answer.inner_text()
        assert console.complaints == []


async def test_an_option_of_a_text_that_is_wrong_is_marked(chromium: Browser, openvino_server: HttpServer) -> None:
    async with _opened(chromium, openvino_server.url) as console:
        await console.choose("continuer", "text_generation")
        await console.page.get_by_text("Options", exact=True).click()
        field = console.page.get_by_role("spinbutton", name="Temperature")
        await field.fill("0.5")
        await console.send()
        await expect(console.page.get_by_role("alert")).to_contain_text("options.temperature: ")
        await expect(field).to_be_focused()
        await console.page.get_by_role("checkbox", name="Do sample").check()
        await console.page.get_by_role("textbox", name="Seed").fill("5")
        await console.send()
        await expect(console.answer.get_by_text("answered in")).to_be_visible()


async def test_people_who_see_little_or_nothing_can_use_the_form_of_a_chat(
    chromium: Browser, openvino_server: HttpServer
) -> None:
    async with _opened(chromium, openvino_server.url, bypass_csp=True) as console:
        await console.page.add_script_tag(path=_AXE)
        await console.choose("writer", "text_generation")
        await console.send()
        await console.page.locator("details").evaluate_all("all => all.forEach((one) => (one.open = true))")
        found = await console.page.evaluate("axe.run()")
        assert [
            (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found["violations"]
        ] == []


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with python, and a grpcurl that takes what the real one does."""
    grpcurl = tmp_path / "grpcurl"
    grpcurl.write_text(
        f'#!/bin/sh\n[ "$2 $3" = "-d @" ] || exit 9\nexec {sys.executable} '
        '-m tests.documentation.snippet_commands grpcurl "$1" -d "$(cat)" "$4" "$5"\n'
    )
    grpcurl.chmod(0o755)
    return f"{tmp_path}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"


_PROGRAMS = {"grpcurl": ("bash", "-c"), "Python": (sys.executable, "-c"), "curl": ("bash", "-c"), "Node": ("node",)}
_HARD_TEXT = 'It\'s "fine": $HOME `id` \\ true, false, 5 €\n\nEND\nnext line'


@pytest.mark.parametrize("language", _PROGRAMS)
@pytest.mark.parametrize("task", ["zero_shot_classification", "image_classification"])
async def test_the_call_can_be_copied_and_gives_the_same_result(
    console: Console, programs: str, tmp_path: Path, language: str, task: str
) -> None:
    await console.choose(_SHOWN[task][0], task)
    if task == "zero_shot_classification":
        await console.page.get_by_role("textbox", name="Text", exact=True).fill(_HARD_TEXT)
        await console.page.get_by_text("Options", exact=True).click()
        await console.page.get_by_role("checkbox", name="Multi label").check()
        await console.page.get_by_role("combobox", name="Priority").select_option(label="Bulk")
    else:
        Image.new("RGB", (40, 30), "teal").save(tmp_path / "picture.jpg")
        await console.page.get_by_label("Image").set_input_files(tmp_path / "picture.jpg")
        await expect(console.page.locator("input[data-value^='/9j/']")).to_be_visible()  # a JPEG in Base64
    await console.send()
    await console.page.get_by_role("radio", name=language, exact=True).check()
    await console.page.get_by_role("button", name="Copy").click()
    await expect(console.page.get_by_text(re.compile(r"Copied|Selected"))).to_be_visible()
    code = await console.code.text_content()
    command = list(_PROGRAMS[language])
    if language == "Node":
        (tmp_path / "call.mjs").write_text(code)
        code = "call.mjs"
    process = await asyncio.create_subprocess_exec(
        *(*command, code),
        cwd=tmp_path,
        env={"PATH": programs, "PYTHONPATH": ":".join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await asyncio.wait_for(process.communicate(), _RUN_LIMIT_S)
    assert process.returncode == 0, error.decode()
    response = await console.response()
    labels = response["result"][task]["labels"]
    if language == "Python":
        found = re.findall(r'label: "(\w+)"\s+score: (\S+)', out.decode())
        assert [label for label, _ in found] == [label["label"] for label in labels]
        assert [float(score) for _, score in found] == pytest.approx([label["score"] for label in labels])
    else:
        result = json.loads(out)["result"]
        (found,) = result.values()
        assert [label["label"] for label in found["labels"]] == [label["label"] for label in labels]
        assert [label["score"] for label in found["labels"]] == pytest.approx([label["score"] for label in labels])


async def test_an_error_is_shown_in_the_servers_words_at_the_field_that_it_names(console: Console) -> None:
    await console.choose("classifier", "text_classification")
    field = console.page.get_by_role("textbox", name="Text", exact=True)
    await field.fill("")
    await console.send()
    await expect(console.page.get_by_role("alert")).to_have_text("INVALID_INPUT, HTTP 400text: is empty")
    await expect(field).to_have_attribute("aria-invalid", "true")
    await expect(field).to_be_focused()
    await field.fill("a")
    await console.send()
    await expect(console.answer.get_by_text("answered in")).to_be_visible()
    assert await field.get_attribute("aria-invalid") is None


async def test_an_error_at_an_option_opens_the_options(console: Console) -> None:
    await console.choose("minilm", "sentence_embedding")
    await console.page.get_by_text("Options", exact=True).click()
    field = console.page.get_by_role("spinbutton", name="Dimensions")
    await field.fill("1000")
    await console.page.get_by_text("Options", exact=True).click()
    await console.send()
    await expect(console.page.get_by_role("alert")).to_contain_text("dimensions: ")
    await expect(field).to_be_focused()


async def test_what_a_caller_wrote_stays_text(console: Console) -> None:
    await console.choose("reranker", "rerank")
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    await console.page.get_by_role("textbox", name="Texts").fill(text)
    await console.send()
    await expect(console.answer.get_by_text(text, exact=True)).to_be_visible()
    assert await console.answer.locator("img, b").count() == 0


async def test_several_copies_can_be_sent_at_once(console: Console) -> None:
    await console.choose("minilm", "sentence_embedding")
    await console.page.get_by_role("spinbutton", name="Copies at once").fill("5")
    await console.send()
    await expect(console.answer.get_by_text("the last of 5.")).to_be_visible()


async def test_it_can_be_used_by_keyboard_alone(console: Console) -> None:
    press = console.page.keyboard.press
    await press("Tab")
    await expect(console.page.get_by_role("link", name="Skip to the form")).to_be_focused()
    await press("Enter")
    await press("Tab")
    model = console.page.get_by_role("form", name="Request").get_by_role("combobox", name="Model")
    await expect(model).to_be_focused()
    await console.page.keyboard.type("classifier")
    await press("Tab")
    await press("Tab")
    await expect(console.page.get_by_role("textbox", name="Text", exact=True)).to_be_focused()
    await press("Control+A")
    await console.page.keyboard.type("By keyboard.")
    await press("Control+Enter")
    await expect(console.answer.get_by_text("classifier version 1 answered in")).to_be_visible()
    seen = set()
    for _ in range(30):
        await press("Tab")
        seen.add(await console.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert {"send", "copies", "code", "copy", "live-model", "pause", "Try answerer"} <= seen


async def test_the_live_panel_can_be_paused_by_keyboard(console: Console) -> None:
    pause = console.page.get_by_role("button", name="Pause")
    await pause.focus()
    await console.page.keyboard.press("Space")
    await expect(pause).to_have_attribute("aria-pressed", "true")
    await expect(console.page.get_by_role("status").filter(has_text="paused")).to_be_visible()
    await console.page.keyboard.press("Space")
    await expect(console.page.get_by_role("status").filter(has_text="live")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1440)])
async def test_people_who_see_little_or_nothing_can_use_it(
    chromium: Browser, http_server: HttpServer, scheme: Literal["light", "dark"], width: int
) -> None:
    # axe-core is put into the page, which the page's policy would not allow.
    options = {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "bypass_csp": True}
    async with _opened(chromium, http_server.url, **options) as console:
        await console.page.add_script_tag(path=_AXE)
        for task in ("token_classification", "sentence_embedding"):
            await console.choose(_SHOWN[task][0], task)
            await console.send()
            await console.page.locator("details").evaluate_all("all => all.forEach((one) => (one.open = true))")
            found = await console.page.evaluate("axe.run()")
            assert [
                (violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found["violations"]
            ] == []
        shown = await console.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", shown)[:3]))
        assert brightness > 600 if scheme == "light" else brightness < 150
        # Nothing is cut off, and nothing scrolls sideways but tables and code.
        assert await console.page.evaluate("document.documentElement.scrollWidth") <= width


async def test_the_policy_holds(console: Console, http_server: HttpServer) -> None:
    tried = await console.page.evaluate(
        """async () => {
          const violated = [];
          document.addEventListener("securitypolicyviolation", (event) => violated.push(event.effectiveDirective));
          const attempt = (run) => { try { run(); } catch {} };
          attempt(() => { document.body.innerHTML = "<b>x</b>"; });
          attempt(() => { document.createElement("script").text = "window.broken = 1"; });
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          document.head.append(style);
          document.body.setAttribute("style", "display: none");
          const image = document.createElement("img");
          image.src = "http://127.0.0.2:9/x.png";
          document.body.append(image);
          await fetch("http://127.0.0.2:9/").catch(() => {});
          await new Promise((resolve) => setTimeout(resolve, 100));
          return { violated, display: getComputedStyle(document.body).display, broken: window.broken };
        }"""
    )
    wanted = {"require-trusted-types-for", "style-src-elem", "style-src-attr", "img-src", "connect-src"}
    assert wanted <= set(tried["violated"])
    assert tried["display"] == "block"
    assert "broken" not in tried or tried["broken"] is None


async def test_the_live_panel_moves_under_load(console: Console, http_server: HttpServer) -> None:
    def number(tile: str) -> Any:
        return console.page.locator(".tile", has_text=tile).locator("b")

    async def load() -> None:
        async with AsyncClient(http_server.process.target) as client:
            while True:
                await asyncio.gather(*(client.embed("minilm", f"text {index}") for index in range(8)))

    await expect(number("Requests a second")).to_have_text("0")
    loading = asyncio.create_task(load())
    try:
        await expect(number("Requests a second")).to_have_text(re.compile(r"^[\d,]{2,}"), timeout=20_000)
        await expect(number("Batch size")).to_have_text(re.compile(r"^[1-9]"))
        await expect(number("Token cache hits")).to_have_text(re.compile("%"))
        row = console.page.get_by_role("row", name="predict.compute")
        await expect(row.get_by_role("cell").nth(0)).to_have_text(re.compile(r"^\d"))
        # The other models have none of it.
        await console.page.locator("#live-model").select_option("answerer")
        await expect(number("Requests a second")).to_have_text("0")
        await console.page.locator("#live-model").select_option("minilm")
        await expect(number("Requests a second")).to_have_text(re.compile(r"^[\d,]{2,}"))
    finally:
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
    await expect(number("Requests a second")).to_have_text("0", timeout=20_000)
    assert console.complaints == []


async def test_a_process_that_drains_does_not_wait_for_consoles(chromium: Browser, http_repository: Path) -> None:
    with running_http_server(http_repository, "--grace-s", "300") as server:
        async with _opened(chromium, server.url) as console:
            server.process.signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.process.wait) == 0
            await expect(console.page.get_by_role("status").filter(has_text="cannot be reached")).to_be_visible()


async def test_spans_and_batch_mates_are_shown_where_traces_are_kept_and_figures_of_other_processes_are_not(
    chromium: Browser, fake_repository: Path
) -> None:
    environment = {"NEURONPIPE_GATEWAY_HTTP_LISTEN": "127.0.0.1:0"}
    with four_processes(fake_repository, "--kept-traces", "50", environment=environment) as processes:
        address = processes["gateway"].wait_for("listening for HTTP")["address"]
        async with _opened(chromium, f"http://{address}") as console:
            elsewhere = console.page.get_by_text("measured in the neuron-executor's own process")
            await expect(elsewhere).to_have_count(3)
            await console.choose("minilm", "sentence_embedding")
            await console.send()
            await expect(console.answer.get_by_text(re.compile("A batch of 1 on fake, core 0: "))).to_be_visible()
            (mate,) = await console.answer.get_by_text(re.compile("this request, ")).all()
            tokens = (await console.response())["usage"]["tokens"]
            assert await mate.inner_text() == f"this request, {tokens} tokens"
            rows = await console.page.get_by_role("table", name="Where the time went").get_by_role("rowheader").all()
            spans = [(await row.inner_text()).split() for row in rows]
            assert spans[:3] == [["http.request", "gateway"], ["preprocess", "gateway"], ["Tokenize", "tokenizer"]]
            assert ["Execute", "neuron-executor"] in spans
            assert ["predict.compute", "neuron-executor"] in spans
            # What fails has spans, too.
            await console.page.get_by_role("textbox", name="Text", exact=True).fill("")
            await console.send()
            await expect(console.page.get_by_role("rowheader", name="preprocess gateway")).to_be_visible()


async def test_a_server_that_knows_its_callers_is_given_a_key(
    chromium: Browser, fake_repository: Path, tmp_path: Path
) -> None:
    files = make_files(tmp_path / "files")
    context = await chromium.new_context()
    with guarded_server(fake_repository, files) as guarded:
        page = await context.new_page()
        await page.goto(f"{guarded.server.url}/")
        field = page.get_by_label("API key or token")
        await field.fill("np_wrong")
        await page.get_by_role("button", name="Use it").click()
        await expect(page.get_by_role("alert")).to_contain_text("no valid API key")
        await field.fill(files.labels)
        await page.get_by_role("button", name="Use it").click()
        console = Console(page, guarded.server.url)
        models = page.get_by_role("form", name="Request").get_by_role("combobox", name="Model").get_by_role("option")
        await expect(models).to_have_text(["classifier"])
        await console.choose("classifier", "text_classification")
        await console.send()
        assert "answered in" in await console.answer.get_by_role("status").text_content()
        assert files.labels not in await page.content()
    await context.close()


async def test_the_table_of_models_follows_the_registry(
    chromium: Browser, fake_repository: Path, tmp_path: Path
) -> None:
    copy_classifier(fake_repository, tmp_path, (1, 2))

    def change(operation: Operation) -> None:
        FolderRepository(tmp_path).change_registry(operation, _SIGNED)

    change(lambda registry: registry.alias("classifier", "stable", 1, _SIGNED))
    with running_http_server(tmp_path, environment=constants(look_every_s=0.1)) as server:
        async with _opened(chromium, server.url) as console:
            rows = console.page.get_by_role("region", name="Table of models").get_by_role("row")
            await expect(rows.nth(1)).to_contain_text(re.compile(r"version 1.*ready.*stable.*100\.0\xa0% of requests"))
            change(lambda registry: registry.alias("classifier", "canary", 2, _SIGNED))
            change(lambda registry: registry.reroute("classifier", {"stable": 3, "canary": 1}, _SIGNED))
            change(lambda registry: registry.copy_to("classifier", "canary", 10, _SIGNED))
            await expect(rows.nth(2)).to_contain_text(
                re.compile(r"version 2.*ready.*canary.*25\.0\xa0% of requests.*copies of 10\.0\xa0%"), timeout=30_000
            )
            await expect(rows.nth(1)).to_contain_text("75.0\xa0% of requests")


async def test_the_page_of_the_api_lists_every_operation_tries_one_and_asks_no_other_host(
    chromium: Browser, fake_repository: Path
) -> None:
    requested: set[str] = set()
    complaints: list[str] = []
    context = await chromium.new_context()
    page = await context.new_page()
    page.set_default_timeout(2000 * _RUN_LIMIT_S)  # the page resolves the schemas of an operation when it is opened
    page.on("request", lambda request: requested.add(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    with running_http_server(fake_repository) as server:
        await page.goto(f"{server.url}/docs")
        shown = page.locator(".opblock-summary-path")
        await expect(shown.first).to_be_visible(timeout=2000 * _RUN_LIMIT_S)
        paths = (await (await context.request.get(f"{server.url}/openapi.json")).json())["paths"]
        assert await shown.count() == sum(len(operations) for operations in paths.values())
        named = page.locator(".opblock-summary-path", has_text=re.compile(r"^/\u200b?v1/\u200b?models$"))
        operation = page.locator(".opblock-get").filter(has=named)
        await operation.locator("button.opblock-summary-control").click()
        await operation.get_by_role("button", name="Try it out").click()
        await operation.get_by_role("button", name="Execute").click()
        await expect(operation.locator(".live-responses-table .response-col_status").last).to_contain_text(
            "200", timeout=2000 * _RUN_LIMIT_S
        )
        await expect(operation.locator(".live-responses-table")).to_contain_text("classifier")
    await context.close()
    assert {url for url in requested if not url.startswith((server.url, "data:"))} == set()
    assert complaints == []


async def test_the_page_of_the_api_asks_for_the_key_of_a_server_that_knows_its_callers(
    chromium: Browser, fake_repository: Path, tmp_path: Path
) -> None:
    files = make_files(tmp_path / "files")
    context = await chromium.new_context()
    with guarded_server(fake_repository, files) as guarded:
        page = await context.new_page()
        await page.goto(f"{guarded.server.url}/docs")
        await page.get_by_label("API key or token").fill("np_wrong")
        await page.get_by_role("button", name="Show").click()
        await expect(page.get_by_role("status")).to_have_text("not accepted")
        await page.get_by_label("API key or token").fill(files.labels)
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator(".opblock-summary-path").first).to_be_visible(timeout=2000 * _RUN_LIMIT_S)
        assert files.labels not in await page.content()
    await context.close()
