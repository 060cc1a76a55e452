"""Takes the pictures of the pages from a running system: `make pictures`, or `python -m tests.pictures REPOSITORY`.

The repository is that of `make demo`. Chromium opens the console and sends a request; docs/console.png is its answer.
"""

import shutil
import sys

from playwright.sync_api import Page, expect, sync_playwright

from demo.processes import ServiceProcess
from tests.pages import ROOT

_OPTIONS = ("--http-listen", "127.0.0.1:0", "--kept-traces", "100")


def take_pictures(repository: str) -> None:
    """Writes the pictures into docs/."""
    program = shutil.which("chromium")
    assert program, "make chromium installs it"
    with ServiceProcess("all", "--repository", repository, *_OPTIONS) as process, sync_playwright() as playwright:
        process.wait_until_ready()
        url = f"http://{process.wait_for('listening for HTTP')['address']}/"
        browser = playwright.chromium.launch(executable_path=program)
        page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="light")
        page.goto(url)
        _send_similarity(page)
        page.get_by_role("region", name="Answer").screenshot(path=ROOT / "docs" / "console.png")
        browser.close()


def _send_similarity(page: Page) -> None:
    """Sends the sample of sentence-similarity twice: the first request of a process takes longer."""
    form = page.get_by_role("form", name="Request")
    form.get_by_role("combobox", name="Model").select_option("minilm")
    form.get_by_role("combobox", name="Task").select_option("sentence_similarity")
    for _ in range(2):
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("region", name="Answer").get_by_role("status")).to_contain_text("answered in")


if __name__ == "__main__":
    take_pictures(sys.argv[1])
