"""README.md: what it shows of the Python client runs as it is."""

import re
from pathlib import Path

import pytest

from tests.unit.client.fake_gateway import fake_gateway

_ROOT = Path(__file__).parents[3]
_SNIPPETS = re.findall(r"^```python\n(.*?)^```", (_ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("shown", ["Client(", "AsyncClient(", "infer_batch(", "infer_stream(", "except Overloaded"])
def test_the_readme_shows_calls_batches_streams_and_errors(shown: str) -> None:
    assert [snippet for snippet in _SNIPPETS if shown in snippet]


@pytest.mark.parametrize("snippet", _SNIPPETS)
def test_a_snippet_runs(snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cat.jpg").write_bytes(b"an image")
    with fake_gateway() as gateway:
        gateway.answering.set()
        exec(snippet.replace("127.0.0.1:50050", gateway.target), {})
