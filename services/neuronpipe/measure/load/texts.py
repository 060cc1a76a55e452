"""Reads the texts to send: the lines of a file, or English text that comes with Python."""

import random
import re
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.core.lines import read_lines

_MAX_FILE_BYTES = 64 << 20

# Words and punctuation marks. With at most 120, no built-in text has more than 128 tokens of MiniLM's tokenizer.
_PIECE = re.compile(r"[^\W_]+|[^\w\s]|_")
_MIN_PIECES = 4
_MAX_PIECES = 120
# The share of texts with two sentences. It makes the mean 33 tokens of MiniLM's tokenizer.
_PAIRED = 0.2

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r'(?<=[.!?]) (?=[A-Z"*])')
_RULE = re.compile(r"[=*\-~+^|# ]*")


def read_texts(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank. Raises SetupError."""
    texts = [line.strip() for _, line in read_lines(path, "--texts", max_bytes=_MAX_FILE_BYTES)]
    if not texts:
        raise SetupError(f"--texts {path}: has no text")
    return texts


def builtin_texts(seed: int) -> list[str]:
    """About 1,800 different texts of one or two sentences, shuffled. Equal seeds give equal texts.

    They have up to 128 tokens, 33 on average. Their source is the language reference of Python's help(), so another
    Python version has slightly different texts.
    """
    chance = random.Random(seed)  # noqa: S311 (nothing to guess here)
    sentences = _sentences()
    texts = []
    for index, sentence in enumerate(sentences):
        pair = f"{sentence} {sentences[index - 1]}"
        texts.append(pair if chance.random() < _PAIRED and _is_of_length(pair) else sentence)
    texts = list(dict.fromkeys(texts))
    chance.shuffle(texts)
    return texts


def _sentences() -> list[str]:
    # Half a megabyte: imported only when used.
    from pydoc_data.topics import topics

    paragraphs = [
        paragraph
        for _, topic in sorted(topics.items())
        for paragraph in _PARAGRAPH_END.split(topic)
        if _is_prose(paragraph)
    ]
    return [
        sentence
        for paragraph in paragraphs
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split()))
        if _is_of_length(sentence)
    ]


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is text: code and grammar are indented, headings underlined."""
    return not any(line.startswith("   ") or _RULE.fullmatch(line) for line in paragraph.splitlines())


def _is_of_length(text: str) -> bool:
    return _MIN_PIECES <= len(_PIECE.findall(text)) <= _MAX_PIECES
