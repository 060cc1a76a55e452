"""Checks the English of pages, protos, alerts, the dashboard and the texts of the program: `python -m tests.style`.

docs/development.md lists the rules; this file has the rules that a pattern can check. Docstrings, comments and help
texts of services/ and of the modules that tests use have more rules than pages have: `_PROSE`. `python -m tests.style
--prose WING` lists the faults of one wing or file. Guides have no dates, docs/ has a limit of words, and a figure that
a page quotes from results is on the page that results.json makes. docs/decisions/0067 says why this program is not
textlint.
"""

import argparse
import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it.token import Token

from tests.documentation.pages import ROOT, all_pages, blocks

# A pattern → what to write.
WORDS: Mapping[str, str] = {
    r"\bin place of\b": "instead of",
    r"\banew\b": "again, or reloaded",
    r"\b(whoever|whatever|nobody|everybody|somebody)\b": "the actor: any client, no caller",
    r"\b(of|most|least|least|up to|after|only|exactly|at) so (many|much|long)\b": "N tokens, that long",
    r"\b(go|goes|going|went|gone) on\b": "continue",
    r"\b(share|shares|shared|sharing) out\b": "distribute",
    r", too\b(?! (long|short|large|many|much|late|old|few))": "also",
    r"\bbesides\b": "also, in addition to",
    r"\b(is|are|was|were|be) away\b": "unavailable",
    r"\bturn(s|ed)? away\b": "refuse",
    r"\b(not at hand|where this is developed|where neuronpipe is developed|the version before)\b": "the status page",
    r"(?<=[.:;] )Of [a-z]": "the subject first",
    r"(?:^|(?<=[.:;] ))(?-i:What) (?!an? )[a-z][^?.]*\.": "a noun as the subject",
    r"\bthe begin of\b": "the start of",
    r"(?<!feature )\bgate\b": "admission control",
    r"\b(?-i:unix) (?=sockets?\b)": "Unix",
    r"\b(host names?|file name)\b": "hostname, filename",
    r"\blife cycles?\b": "lifecycle",
    r"\bstop(s|ped)? to [a-z]": "stops accepting, the opposite of stopping to accept",
    r"(?<=[;,] )(or )?delete (it|them|the link)\b": "move it, or choose another: advice to delete may hit what is fine",
}
# The same for docstrings, comments and help texts, in which code in backticks is a word.
_UNIT = r"\d[\d.,]* ?(ns|µs|ms|s|%|bytes|[kKMG]i?B)(?![\w/])"
_VERB = r"(is|are|was|were|has|have|had|does|do|did|can|may|must|will|would|should)"
_PROSE: Mapping[str, str] = {
    r"^(What|Of|Those|Where|Who|Whose|Whom|Which|How|Why|That of)\b": "a verb or a noun first, not a fragment",
    r"(?<=[.;:] )(?-i:Of|Those|Who|Whose|That of) ": "a noun as the subject, not a fragment",
    r"(?<=[,;:(] )of (?!course\b|which\b|whom\b)|(?<=\()of ": "`of` right behind its noun, or another sentence",
    r"^(It|They|He|She|We|You|Its|Their|(Any|Every|Some|No)thing)\b": "a noun as the subject of the first sentence",
    rf"^(This|That|These|All|Both|Each|Some|None|One|Any) (that|which|who|of|{_VERB})\b": "a noun as the subject",
    r"\b(that|those) of\b": "the noun again",
    r"\bto ((the|an?|its|their) )?[\w-]+['’]s(?=[.,;:)]|$| (is|are|of|in|at|with|by)\b)": "relative to, with the noun",
    rf"(, (and|or) |^|(?<=[.;:] )){_UNIT} (for|per|of|with|at|in|on|by)\b": "a noun before the quantity",
    r"\bones\b|(?<!by )\bone(?=[.,;:)]|$| (that|which|who|whose|with|without|is|has|does)\b)": "the noun again",
    r"\bso (many|much)\b": "N tokens, most N, at least N",
}
# First words that leave a help text without a verb or a noun that says what the option sets.
_HELP = re.compile(r"(default|as|if|with|without|for|in|by|at|to|on|not|most|least|fewest|that|than|when)\b")
# The argument that is the help text, by the functions of the command line that add options and commands.
_HELP_PLACES = {"option": 2, "subcommand": 3}
# The first word of a function's docstring: a verb, or a reference to the contract that has the method.
_FIRST_WORD = re.compile(r"(?!(This|Its|Always|Plus|Less)\b)[A-Z][a-z-]+s\b|See\b")
_PRAGMA = re.compile(r"(noqa|type:|fmt:|pragma|ruff:|mypy:|isort:|!|-\*-|SPDX)")
_FLOATING = r"(?<=[,;:(] )of (?!course\b|which\b|whom\b)|(?<=\()of "
# The same for pages, whose tables may begin with a word that a sentence may not begin with.
_OF_PAGES: Mapping[str, str] = {pattern: instead for pattern, instead in _PROSE.items() if pattern == _FLOATING} | {
    r"(?<=[.;:] )(?-i:Of|Those|Whose|That of|Equal to|One that|One without) ": "a noun as the subject, not a fragment",
    r"\bto ((the|an?|its|their) )?[\w-]+['’]s(?=[.,;:)]|$| (is|are|of|in|at|with|by)\b)": "relative to, with the noun",
}
_MAX_WORDS_OF_PROSE = 30
_HEADING = re.compile(r"(What|Who|Is|Are|Does|Do) ")
_DATE = re.compile(r"20\d\d-\d\d-\d\d")
_MAX_WORDS_OF_SENTENCE = 45
# Words of docs/, without decisions, results of benchmarks, generated pages, blocks of code.
_MAX_WORDS = 45_000
_DOCS = ROOT / "docs"
_RESULTS_BY_HAND = _DOCS / "benchmarks" / "README.md"
_SERVICES = ROOT / "services" / "neuronpipe"
# Modules that tests use, without the tests.
_HELPERS = [ROOT / "tests" / name for name in ("callers", "conftest.py", "doubles", "servers", "suite", "systems")]
_GENERATED = {"telemetry.md", "models.md", "attacks.md", "day.md", "interop.md"}
# Pages with dates and questions.
_WITH_DATES = {
    "CHANGELOG.md",
    "comparison.md",
    "containers.md",
    "README.md",
    "limits.md",
    "quick-start.md",
    "status.md",
}
# Samples of tasks are texts of people.
_SAMPLES = {"inputs.py"}
_QUOTED = re.compile(
    r"(?<![\w.-])(?:\d+\.\d+(?![.\w])|\d[\d,]*(?= (?:×|%|ms|texts/s|tokens/s|MB)(?!\w))|(?<=\| )\d[\d,]*(?= \|))"
)
_MARK = re.compile(r"<!-- ([\w ]+: (made|written) by .*|end|/\w+) -->$")
_RESULTS = re.compile(r"benchmarks/(with(?:out)?-[\w-]+)/README\.md")


def is_generated(page: Path) -> bool:
    """Returns whether a page is made by a program, or is the record of a decision."""
    parts = page.relative_to(_DOCS).parts if page.is_relative_to(_DOCS) else ()
    is_results = parts[:1] == ("benchmarks",) and page != _RESULTS_BY_HAND
    return is_results or parts[:1] in (("decisions",), ("reference",)) or page.name in _GENERATED


def prose(page: Path) -> Iterator[tuple[str, int, bool, str]]:
    """Yields the place of each text of a page, and whether the text is a heading. Leaves out code."""
    kind = ""
    for block in blocks(page):
        kind = block.type if block.type.endswith("_open") else kind
        if block.children:
            text = "".join(map(_shown, block.children))
            yield f"{page.relative_to(ROOT)}", (block.map or [0])[0] + 1, kind == "heading_open", text


def _shown(part: Token) -> str:
    if part.type == "code_inline":
        return "`code`"
    return part.content if part.type == "text" else " " if part.type.endswith("break") else ""


def sources() -> Iterator[tuple[str, int, bool, str]]:
    """Yields the same for the program's strings without docstrings, comments of protos, alerts and the dashboard."""
    for path in sorted((ROOT / "services").rglob("*.py")):
        if "api" not in path.parts and path.name not in _SAMPLES:
            for node, text in _strings(ast.parse(path.read_text(encoding="utf-8"))):
                yield str(path.relative_to(ROOT)), node.lineno, False, text
    # Those of protos/google are copied as published.
    protos = (path for path in (ROOT / "protos").rglob("*.proto") if "google" not in path.parts)
    for path in (*sorted(protos), _DOCS / "alerts.yaml", _DOCS / "grafana.json"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if path.suffix != ".proto" or "//" in line:
                yield str(path.relative_to(ROOT)), number, False, line


def _strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yields the strings of a source with several words; values that an f-string puts in are an ellipsis."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if " " in text and "redis.call" not in text:
            yield node, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each comment of a source. Lines of comments below each other are one text."""
    block: list[str] = []
    first = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("#").strip()
        if token.type != tokenize.COMMENT or _PRAGMA.match(text):
            continue
        line, place = token.start
        if block and (line, place) != (last + 1, column):
            yield first, " ".join(block)
            block = []
        first = line if not block else first
        block.append(text)
        last, column = line, place
    if block:
        yield first, " ".join(block)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring's paragraphs. Leaves out indented blocks: drawings or code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = inspect.cleandoc(node.value.value).splitlines()
            first = 0
            for number, line in enumerate([*lines, ""]):
                if not line.strip() or re.match("[-*] ", line):
                    text = " ".join(" ".join(lines[first:number]).strip("-* ").split())
                    if text and not lines[first].startswith("    "):
                        yield node.lineno + first, text
                    first = number if line.strip() else number + 1


def without_verb(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the first word of each docstring of a function that does not begin with a verb.

    A property may begin with a noun, and a constructor with a name in backticks: its argument.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
            is_argument = node.name == "__init__" and text.startswith("`")
            if not (is_property or is_argument or _FIRST_WORD.match(text)):
                yield node.body[0].lineno, text.split()[0]


def help_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of the help of each option, command and setting."""
    for node in ast.walk(tree):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            place = (
                _HELP_PLACES.get(node.func.id, len(node.args)) if isinstance(node.func, ast.Name) else len(node.args)
            )
            named = [keyword.value for keyword in node.keywords if keyword.arg in ("help", "description")]
            texts = [*node.args[place : place + 1], *named]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELP":
            texts = [node.value]
        yield from ((part.lineno, text) for value in texts for part, text in _strings(value))


def wrong_prose(text: str, *, is_help: bool = False) -> Iterator[str]:
    """Yields the faults of a comment, a help text or a paragraph of a docstring, with the words to write instead."""
    text = re.sub(r"`[^`]*`", "`code`", text)
    seen: set[int] = set()
    for pattern, instead in {**_PROSE, **WORDS}.items():
        for match in re.finditer(pattern, text, 0 if pattern.endswith("[a-z]") else re.IGNORECASE):
            if seen.isdisjoint(range(*match.span())):
                yield f"“{match[0].strip()}”: {instead}"
            seen.update(range(*match.span()))
    if is_help and (first := _HELP.match(text)):
        yield f"“{first[0]}”: a help text begins with a verb or a noun"
    yield from long_sentences(text, _MAX_WORDS_OF_PROSE)


def prose_faults(paths: Iterable[Path]) -> Iterator[str]:
    """Yields the faults of docstrings, comments and help texts in folders or files, with their places."""
    files = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    for file in sorted(file for file in files if "_pb2" not in file.name and file.name not in _SAMPLES):
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        helps = list(help_texts(tree))
        texts = [*docstrings(tree), *comments(source), *helps]
        found = [(line, fault) for line, text in texts for fault in wrong_prose(text, is_help=(line, text) in helps)]
        found += [(line, f"“{word}”: a function's docstring begins with a verb") for line, word in without_verb(tree)]
        yield from (f"{file.relative_to(ROOT)}:{line}: {fault}" for line, fault in sorted(found))


def faults() -> Iterator[str]:
    """Yields the faults of all texts, with their places and the words to write instead."""
    by_hand = [page for page in all_pages() if not is_generated(page)]
    for place, line, is_heading, text in (*(passage for page in by_hand for passage in prose(page)), *sources()):
        is_guide = place.endswith(".md") and Path(place).name not in _WITH_DATES
        is_page = place.endswith(".md")
        for fault in wrong_words(text, is_heading=is_heading, is_guide=is_guide, is_page=is_page):
            yield f"{place}:{line}: {fault}"
    guides = (page for page in by_hand if page.is_relative_to(_DOCS) and page != _RESULTS_BY_HAND)
    if (count := sum(map(words, guides))) > _MAX_WORDS:
        yield f"docs/: {count} words by hand, at most {_MAX_WORDS}"
    yield from prose_faults([_SERVICES, *_HELPERS])
    for page in by_hand:
        if page != _RESULTS_BY_HAND:  # has figures of its own, from the commands that it names
            yield from wrong_figures(page)
    for folder in sorted((_DOCS / "benchmarks").glob("with*")):
        yield from wrong_results(folder)


def wrong_words(text: str, *, is_heading: bool = False, is_guide: bool = False, is_page: bool = False) -> Iterator[str]:
    """Yields the faults of a text, with the words to write instead. A page has more rules than other texts."""
    for pattern, instead in {**WORDS, **(_OF_PAGES if is_page else {})}.items():
        for found in re.finditer(pattern, text, 0 if pattern.endswith("[a-z]") else re.IGNORECASE):
            yield f"“{found[0]}”: {instead}"
    if is_heading and _HEADING.match(text):
        yield f"“{text}”: a noun phrase or an imperative"
    if is_guide and _DATE.search(text):
        yield "a date: link to a page of results"
    yield from long_sentences(text, _MAX_WORDS_OF_SENTENCE)


def long_sentences(text: str, most_words: int) -> Iterator[str]:
    """Yields the sentences of a text with too many words. Names in code are no words."""
    for sentence in re.split(r"(?<=[.!?;:])\s", text):
        if (length := sum("_" not in word for word in sentence.split())) > most_words:
            yield f"a sentence of {length} words: “{sentence[:60]}…”"


def words(page: Path) -> int:
    """Counts the words of a page, without blocks of code, figures, and tables that a program writes into it."""
    lines = page.read_text(encoding="utf-8").splitlines()
    made = {number for begin, end in _made(lines) for number in range(begin, end)}
    by_hand = (block for block in blocks(page) if not block.map or block.map[0] not in made)
    parts = (part for block in by_hand for part in block.children or () if part.type in ("text", "code_inline"))
    return sum(bool(re.search("[A-Za-z]", word)) for part in parts for word in part.content.split())


def _made(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yields the first and the last line of each part that a program writes."""
    marks = [number for number, line in enumerate(lines) if _MARK.match(line)]
    yield from zip(marks[::2], marks[1::2], strict=True)


def wrong_figures(page: Path) -> Iterator[str]:
    """Yields the figures of sections that link to pages of results, and that none of these pages has.

    A figure is a decimal number, a number before a unit, or a number alone in a cell of a table.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    made = {number for begin, end in _made(lines) for number in range(begin, end)}  # checked by their programs
    for title, section in _sections(["" if number in made else line for number, line in enumerate(lines)]):
        if folders := {match[1] for match in _RESULTS.finditer(section)}:
            known = frozenset[str]().union(*map(_figures, folders))
            for quoted in _QUOTED.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|" + _DATE.pattern, "", section)):
                if not any(_is_rounded(quoted.replace(",", ""), figure) for figure in known):
                    yield f"{page.relative_to(ROOT)}: {title}: {quoted} is not on {', '.join(sorted(folders))}"


def _is_rounded(quoted: str, figure: str) -> bool:
    """Returns whether a page quotes a figure, as it is or with fewer digits."""
    digits = len(quoted.partition(".")[2])
    return abs(float(quoted) - float(figure)) <= 0.5 * 10.0**-digits + 1e-9 and digits <= len(figure.partition(".")[2])


def _sections(lines: list[str]) -> Iterator[tuple[str, str]]:
    starts = [number for number, line in enumerate(lines) if line.startswith("#")]
    for begin, end in pairwise([*starts, len(lines)]):
        yield lines[begin].lstrip("# "), "\n".join(lines[begin + 1 : end])


@cache
def _figures(folder: str) -> frozenset[str]:
    """Returns the figures on a page of results."""
    return frozenset(re.findall(r"\d+(?:\.\d+)?", (_DOCS / "benchmarks" / folder / "README.md").read_text()))


def wrong_results(folder: Path) -> Iterator[str]:
    """Yields the targets of a results.json whose figures its page does not show."""
    page = (folder / "README.md").read_text()
    shown = dict(re.findall(r"^\| (.+?) \| [^|]+ \| (-?[\d.]+) [^|]*\|", page, re.MULTILINE))
    for target in json.loads((folder / "results.json").read_text())["targets"]:
        median = (target["measured"] or {}).get("median")
        if median is not None and not _is_rounded(shown.get(target["name"], "nan"), str(median)):
            yield f"{folder.relative_to(ROOT)}: {target['name']}: {median} is not on the page"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.style", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prose", nargs="+", metavar="WING", help="list the faults of these wings or files only")
    wings = [_SERVICES / wing for wing in parser.parse_args().prose or ()]
    if found := list(prose_faults(wings) if wings else faults()):
        sys.exit("\n".join([*found, f"{len(found)} faults of style; the rules are on docs/development.md"]))
