"""The checks of docstrings, comments and help texts: each rule with a text against it, and a text that keeps it."""

import ast
from pathlib import Path

import pytest

from tests import style

# For each rule, in the order of `_PROSE`: texts against it, and a text that says the same and keeps all rules.
_RULES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "What the model writes.",
            "Of a bundle, its files.",
            "Those with a deadline.",
            "Where a cache is full.",
            "who asks meanwhile shares a page",
            "That of the stage.",
        ),
        "Scrapes that arrive while the page is rendered get the same page.",
    ),
    (("The parts of a text. Those without an offset.",), "The parts of a text. Parts without an offset are left out."),
    (("The share of the limits, of requests or tokens.", "The rows (of one text)."), "The share of the two limits."),
    (("It has passed its deadline.", "Everything in it."), "Records that this request missed its deadline."),
    (("All that is declared.", "One of the answers."), "Each answer of the model."),
    (("The shape is that of the input.",), "The shape is the shape of the input."),
    (("The ratio of the time to PyTorch's.",), "The time relative to the time of PyTorch, sent to PyTorch's cache."),
    (("A batch costs 2.7 ms, and 0.26 ms for each token.",), "A batch takes 2.7 ms plus 0.26 ms per token."),
    (("A longer bucket, or a larger one.", "Old ones first."), "A longer bucket, or one larger bucket."),
    (("After the first token, so many become text.",), "Number of tokens that are decoded after the first token."),
)


def test_each_rule_has_a_text_against_it() -> None:
    assert len(_RULES) == len(style._PROSE)


@pytest.mark.parametrize(
    ("text", "instead"),
    [(text, instead) for (wrong, _), instead in zip(_RULES, style._PROSE.values(), strict=True) for text in wrong],
)
def test_prose_against_a_rule_is_found_once(text: str, instead: str) -> None:
    assert [fault.rpartition("”: ")[2] for fault in style.wrong_prose(text)] == [instead]


@pytest.mark.parametrize("text", [right for _, right in _RULES])
def test_prose_that_keeps_all_rules_is_fine(text: str) -> None:
    assert list(style.wrong_prose(text)) == []


@pytest.mark.parametrize("word", ["whoever", "whatever", "nobody", "everybody", "somebody"])
def test_a_word_that_names_no_actor_is_found_in_prose(word: str) -> None:
    assert list(style.wrong_prose(f"Errors that {word} reads.")) == [f"“{word}”: the actor: any client, no caller"]


@pytest.mark.parametrize(("words", "count"), [(30, 0), (31, 1)])
def test_a_sentence_of_prose_has_at_most_thirty_words(words: int, count: int) -> None:
    assert len(list(style.wrong_prose(" ".join(["Word"] * words) + ". A sentence after it."))) == count


@pytest.mark.parametrize("text", ["default: a table", "fewest calls of a cell", "with a folder, all files"])
def test_a_help_text_begins_with_a_verb_or_a_noun(text: str) -> None:
    assert len(list(style.wrong_prose(text, is_help=True))) == 1
    assert list(style.wrong_prose("output format (default: a table)", is_help=True)) == []


def test_code_in_backticks_is_no_prose() -> None:
    assert list(style.wrong_prose("Counts `those of` in `whatever`.")) == []


_SOURCE = '''"""A module.

Text over
two lines.

    what is indented is a drawing

- an item
- an item over
  two lines
"""

LIMIT = 1  # one byte
# A comment over
# two lines.
FIELD = Field(description="limit "
              "in bytes")  # noqa: E501
TEXT = "What is no help."


def run() -> None:
    """Runs."""
    parser.add_argument("--limit", help="maximum size")
    option(parser, "--size N", f"size in {unit}", 1, dest="a name")
    subcommand(commands, "list", run, "lists the files")
'''


def test_every_paragraph_comment_and_help_text_has_its_line() -> None:
    tree = ast.parse(_SOURCE)
    paragraphs = [(1, "A module."), (3, "Text over two lines."), (8, "an item"), (9, "an item over two lines")]
    assert list(style.docstrings(tree)) == [*paragraphs, (22, "Runs.")]
    assert list(style.comments(_SOURCE)) == [(13, "one byte"), (14, "A comment over two lines.")]
    helps = [(16, "limit in bytes"), (23, "maximum size"), (24, "size in …"), (25, "lists the files")]
    assert list(style.help_texts(tree)) == helps


_FUNCTIONS = '''
class Cache:
    """The class."""

    def __init__(self, size: int) -> None:
        """`size`: number of texts."""

    @property
    def free(self) -> int:
        """The number of free places."""

    def find(self, key: str) -> str:
        """See Store. Returns an empty text for an unknown key."""

    def has(self, key: str) -> bool:
        """Whether a key is stored."""

    async def take(self, key: str) -> str:
        """`key`: of a text."""


def load() -> Cache:
    """Loads a cache."""

    def read() -> str:
        """The text of a file."""


def size_of(cache: Cache) -> int:
    """This is the size."""
'''


def test_docstring_of_a_function_begins_with_a_verb() -> None:
    found = [(16, "Whether"), (19, "`key`:"), (26, "The"), (30, "This")]
    assert sorted(style.without_verb(ast.parse(_FUNCTIONS))) == found


def test_faults_of_a_file_are_listed_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "ROOT", tmp_path)
    (tmp_path / "wing").mkdir()
    run = '\n\ndef run() -> None:\n    """A run."""\n'
    (tmp_path / "wing" / "module.py").write_text(f'"""A module."""\n\nLIMIT = 1  # Of a text.\n{run}')
    (tmp_path / "wing" / "made_pb2.py").write_text("# Of a message.\n")
    assert list(style.prose_faults([tmp_path / "wing"])) == [
        "wing/module.py:3: “Of”: a verb or a noun first, not a fragment",
        "wing/module.py:7: “A”: a function's docstring begins with a verb",
    ]
