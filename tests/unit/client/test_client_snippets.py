"""The pages of docs/ that show the Python client: their snippets run as they are."""

import re
from pathlib import Path

import pytest

from tests.unit.client.fake_gateway import fake_gateway

_ROOT = Path(__file__).parents[3]
_PAGES = ("docs/quick-start.md", "docs/clients.md")


def _snippets(page: str) -> list[str]:
    """Those of our own client, but for those with a comment that they are not run, or where; see
    tests/repository/test_snippets.py.
    """
    text = (_ROOT / page).read_text(encoding="utf-8")
    snippets = re.findall(r"(?<!-->)\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [snippet for snippet in snippets if "neuronpipe" in snippet]


_SNIPPETS = [
    pytest.param(snippet, id=f"{page}-{number}") for page in _PAGES for number, snippet in enumerate(_snippets(page))
]


@pytest.mark.parametrize("shown", ["Client(", "AsyncClient(", "infer_batch(", "infer_stream(", "except Overloaded"])
def test_the_page_of_clients_shows_calls_batches_streams_and_errors(shown: str) -> None:
    assert [snippet for snippet in _snippets("docs/clients.md") if shown in snippet]


@pytest.mark.parametrize("page", _PAGES)
def test_every_page_has_a_snippet(page: str) -> None:
    assert _snippets(page)


@pytest.mark.parametrize("snippet", _SNIPPETS)
def test_a_snippet_runs(snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.jpg").write_bytes(b"an image")
    with fake_gateway() as gateway:
        gateway.answering.set()
        exec(snippet.replace("127.0.0.1:50050", gateway.target), {})
