"""The pages of the documentation as a whole: links, the navigation of the site, and the names that pages mention."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.bulk.transform.near_engine import TransformSettings
from neuronpipe.cli.request import flag
from neuronpipe.cli.serve import SERVICES, settings_of
from neuronpipe.core.settings import Settings, fields_of, variable_name
from neuronpipe.core.task_inputs import FIELDS
from neuronpipe.measure.acceptance_process import AcceptSettings
from neuronpipe.platform.cache.settings import CacheCommandSettings
from tests import links, style
from tests.documentation import pages
from tests.documentation.pages import ROOT, all_pages, anchors, blocks, fences
from tests.links import dead_links, dead_mentions, sources

_ALL: Sequence[type[Settings]] = (*map(settings_of, SERVICES), CacheCommandSettings, AcceptSettings, TransformSettings)
_SETTINGS = [(kind, name) for kind in _ALL for name in fields_of(kind)]
# Options of other projects' programs that pages name and nothing here uses.
_OF_OTHERS = {"--neuroncore-pipeline-cores"}
# In the navigation of the site, so that a reader sees it whole.
_MOST_PAGES = 57
# What users run, or copy from a screen.
_RUN_BY_USERS = ("services", "demo", "examples", "docker", "deploy")
_NEWER_CURL = re.compile(r"\bcurl\b(?:[^\n]|\\\n)*?\s\W?--(?:json|url-query|variable|expand-\w+|no-clobber)\b")
_AFTER_EMPTY_LINE = {"bullet_list_open", "ordered_list_open", "table_open"}
_BLOCKS = {*_AFTER_EMPTY_LINE, "fence", "paragraph_open"}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page to write, alone in its repository."""
    for module in (links, pages, style):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path / "page.md"


def test_every_page_but_decisions_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\n\n")[0]
    listed = re.findall(r"^ +- (?:[\w ,]+: )?(\S+\.md)$", nav, re.MULTILINE)
    docs = (file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md"))
    assert sorted(listed) == sorted(str(doc) for doc in docs if doc.parts[0] != "decisions" or doc.stem == "README")
    assert len(listed) <= _MOST_PAGES


def test_the_index_lists_the_pages_of_the_navigation_in_their_order() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\n\n")[0]
    _, *pages_of_site = re.findall(r"^ +- (?:[\w ,]+: )?(\S+\.md)$", nav, re.MULTILINE)
    rows = (ROOT / "docs" / "index.md").read_text().partition("## All pages")[2].partition("\nAlso:")[0]
    assert re.findall(r"\[[^\]]+\]\(([^)]+)\)", rows) == pages_of_site


def test_every_decision_has_a_status_and_a_date() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    said = re.compile(r"^# .+\n\nStatus: (accepted|superseded), \d{4}-\d\d-\d\d\.")
    assert [decision.name for decision in decisions if not said.match(decision.read_text())] == []


def _unknown(pattern: str, known: set[str]) -> list[str]:
    """What pages name by a pattern that is neither known nor a word of the sources."""
    code = "\n".join(file.read_text(errors="replace") for file in sources())
    named = {(page, name) for page in all_pages() for name in re.findall(pattern, page.read_text())}
    missing = [(page, name) for page, name in named if name not in known and not re.search(rf"{name}(?![\w-])", code)]
    return [f"{page}: {name}" for page, name in missing]


def test_every_variable_that_a_page_names_exists() -> None:
    known = {variable_name(kind, name) for kind, name in _SETTINGS}
    assert _unknown(r"\bNEURONPIPE_\w+[A-Z]\b(?!_?\*)", known) == []


def test_every_option_that_a_page_names_exists() -> None:
    named = {name for _, name in _SETTINGS} | {*GenerationOptions.DESCRIPTOR.fields_by_name}
    known = _OF_OTHERS | {f"--{name.replace('_', '-')}" for name in named} | {*map(flag, FIELDS)}
    # A bool of generation has two options.
    switches = (field for field in GenerationOptions.DESCRIPTOR.fields if field.type == field.TYPE_BOOL)
    known |= {f"--no-{field.name.replace('_', '-')}" for field in switches}
    assert _unknown(r"`(--[a-z][\w-]*)", known) == []


def test_calls_by_curl_have_no_option_that_the_curl_of_ubuntu_22_04_lacks() -> None:
    """Of curl 7.81: --json came with 7.82."""
    files = (file for folder in _RUN_BY_USERS for file in sorted((ROOT / folder).rglob("*")) if file.is_file())
    texts = ((file, file.read_text(errors="replace")) for file in (*all_pages(), *files) if file.suffix != ".pyc")
    assert [
        f"{file.relative_to(ROOT)}: {found[0]}" for file, text in texts for found in _NEWER_CURL.finditer(text)
    ] == []


@pytest.mark.parametrize(
    "text", ["$ curl URL --json '{}'", "$ curl URL \\\n  --json @-", '["curl", URL, "--json", text]']
)
def test_a_newer_option_of_curl_is_found(text: str) -> None:
    assert _NEWER_CURL.search(text)


def _differs_on_the_site(page: Path) -> Iterator[int]:
    """The lines of blocks that the site's Markdown reads otherwise than GitHub's.

    It wants an empty line before a list or a table, and four spaces before what belongs to an item of a list.
    """
    lines = page.read_text().splitlines()
    for block in blocks(page):
        if not block.map or block.type not in _BLOCKS:
            continue
        line, before = lines[block.map[0]], lines[block.map[0] - 1] if block.map[0] else ""
        is_first_of_item = block.type == "paragraph_open" and re.match(r" *([-*]|\d+\.) ", line)
        is_outdented = len(line) - len(line.lstrip()) < 4 * (block.level // 2)
        is_glued = block.type in _AFTER_EMPTY_LINE and before and not before.endswith("-->")
        if (is_glued and block.level == 0) or (is_outdented and not is_first_of_item):
            yield block.map[0] + 1


def test_lists_and_tables_are_the_same_on_the_site_as_on_github() -> None:
    docs = [page for page in all_pages() if page.is_relative_to(ROOT / "docs")]
    assert [f"{doc.relative_to(ROOT)}:{line}" for doc in docs for line in _differs_on_the_site(doc)] == []


@pytest.mark.parametrize("text", ["Text\n- a", "Text\n| a |\n|---|", "1. a\n\n   ```text\n   ```\n", "- a\n  - b\n"])
def test_what_the_site_would_show_otherwise_is_found(page: Path, text: str) -> None:
    page.write_text(text)
    assert list(_differs_on_the_site(page))


@pytest.mark.parametrize("text", ["Text\n\n- a\n- b", "1. a\n2. b\n\n    ```text\n    ```\n", "- a\n    - b\n"])
def test_what_both_show_alike_is_fine(page: Path, text: str) -> None:
    page.write_text(text)
    assert list(_differs_on_the_site(page)) == []


_DEAD = {
    "page": "none.md",
    "heading": "#none",
    "heading of another page": "other.md#none",
    "outside": "../page.md",
    "image": "none.png",
    "folder": "docs/",
}


@pytest.mark.parametrize("link", _DEAD.values(), ids=_DEAD)
def test_a_link_that_leads_nowhere_is_found(page: Path, link: str) -> None:
    page.write_text(f"# A page\n\n![see]({link})\n")
    page.with_name("other.md").write_text("# Another page\n")
    assert list(dead_links([page])) == [f"page.md:3: {link}"]


@pytest.mark.parametrize("link", ["#a-page", "other.md", "other.md#another-page", "https://a.example/", "#a-page-1"])
def test_a_link_that_leads_somewhere_is_fine(page: Path, link: str) -> None:
    page.write_text(f"# A page\n\n[see]({link})\n\n## A page\n")
    page.with_name("other.md").write_text("# Another page\n")
    assert list(dead_links([page])) == []


def test_a_file_of_docs_that_is_not_there_is_found_where_a_source_names_it(page: Path) -> None:
    source = page.with_name("source.py")
    missing = "/".join(["docs", "none.md"])  # not in one word, as this file is searched as well
    source.write_text(f"# see {missing}\n# and docs/decisions/0001, https://a.example/{missing}\n")
    (page.parent / "docs" / "decisions").mkdir(parents=True)
    (page.parent / "docs" / "decisions" / "0001-first.md").touch()
    assert list(dead_mentions([source])) == [f"source.py:1: {missing}"]


# A wrong text for each pattern, in the order of the patterns.
_WRONG = (
    "in place of a text",
    "reads it anew",
    "whoever calls",
    "at most so many bytes",
    "and so they go on",
    "shares out the cores",
    "texts, too",
    "besides the cache",
    "the stage is away",
    "turns away callers",
    "the version before",
    "so. Of these two",
    "What is wrong has a status.",
    "the begin of a text",
    "waits at the gate",
    "over a unix socket",
    "its host name",
    "the life cycle",
    "stops to accept keys",
    "is another one; delete it",
)


def test_each_pattern_of_style_finds_its_text() -> None:
    found = ["".join(style.wrong_words(text)).rpartition("”: ")[2] for text in _WRONG]
    assert found == [*style.WORDS.values()]


@pytest.mark.parametrize("text", [*_WRONG, "measured on 2026-11-21", " ".join(["word"] * 46)])
def test_a_word_a_date_and_a_sentence_against_the_rules_of_style_are_found(text: str) -> None:
    assert len(list(style.wrong_words(text, is_guide=True))) == 1


def test_plain_english_is_fine() -> None:
    text = "It takes the text instead, reloads it, and continues. The list is too long, too long for one call."
    assert list(style.wrong_words(text, is_guide=True)) == []


@pytest.mark.parametrize(("quoted", "count"), [("1.56 ×", 0), ("78 texts/s", 0), ("9.99 ×", 1), ("123456 texts/s", 1)])
def test_a_quoted_figure_is_one_of_the_results(page: Path, quoted: str, count: int) -> None:
    page.write_text(f"# A page\n\n{quoted} ([results](benchmarks/with-vnni-bfloat16-amx/README.md))\n")
    assert len(list(style.wrong_figures(page))) == count


def test_anchors_are_those_of_github(page: Path) -> None:
    titles = ["`neuronpipe infer`", "Overload & admission", "What's new, 2.0?", "Ünïcode", "Twice", "Twice"]
    page.write_text("\n".join(f"# {title}" for title in titles))
    assert anchors(page) == {"neuronpipe-infer", "overload--admission", "whats-new-20", "ünïcode", "twice", "twice-1"}


def test_a_mark_holds_for_the_block_right_behind_it(page: Path) -> None:
    mark = "<!-- not run here: needs a device -->"
    parts = [
        f"{mark}\n```console\n$ a\n```",
        "```console\n$ b\n```",
        f"{mark}\n\nText.\n\n```js\nc\n```",
        f"1. Item\n\n    {mark}\n    ```text\n    d\n    ```\n",
    ]
    page.write_text("\n\n".join(parts))
    found = [(fence.line, fence.language, fence.content, fence.reason) for fence in fences(page)]
    assert found == [
        (2, "console", "$ a\n", "needs a device"),
        (6, "console", "$ b\n", ""),
        (14, "js", "c\n", ""),
        (21, "text", "d\n", "needs a device"),
    ]
