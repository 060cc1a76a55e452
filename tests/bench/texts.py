"""Real English of mixed length: what the benchmarks send. Sentences and short paragraphs of Python's own help texts.

Run: python -m tests.bench.texts COUNT FILE  writes them to a file, one a line.
"""

import itertools
import pydoc_data.topics
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import transformers

from demo.model import find_minilm

MAX_TOKENS = 128
_SEED = 20261121
_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_MIN_LETTERS = 0.85
_MIN_CHARACTERS = 20
_BLOCK = 32


def make_texts(count: int) -> list[str]:
    """`count` texts of 6 to 128 tokens, mean about 33, the same ones in every run; they repeat after some 2,000.

    Long and short are dealt evenly over the run, at random only within each 32 texts, so that a system which gets
    through a part of them has the same work as one that gets through all.
    """
    paragraphs = list(_paragraphs())
    sentences = [
        sentence
        for paragraph in paragraphs
        for sentence in _SENTENCE_END.split(paragraph)
        if len(sentence) > _MIN_CHARACTERS
    ]
    # Half of the paragraphs lift the mean from a sentence's 29 tokens to what short user texts have.
    chooser = random.Random(_SEED)
    candidates = sorted({*sentences, *chooser.sample(paragraphs, len(paragraphs) // 2)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_minilm())
    lengths = [len(ids) for ids in tokenizer(candidates, verbose=False)["input_ids"]]
    lengths_of = {text: length for text, length in zip(candidates, lengths, strict=True) if length <= MAX_TOKENS}
    texts = list(lengths_of)
    chooser.shuffle(texts)
    texts = _dealt(sorted(texts[:count], key=lambda text: lengths_of[text]), chooser)
    return list(itertools.islice(itertools.cycle(texts), count))


def _dealt(by_length: Sequence[str], chooser: random.Random) -> list[str]:
    """The texts in blocks that all have the same mix of lengths."""
    count = max(1, len(by_length) // _BLOCK)
    blocks = [list(by_length[number::count]) for number in range(count)]
    chooser.shuffle(blocks)
    for block in blocks:
        chooser.shuffle(block)
    return [text for block in blocks for text in block]


def _paragraphs() -> list[str]:
    """Paragraphs of prose: no headings, no code, no grammar."""
    help_texts: dict[str, str] = pydoc_data.topics.topics
    blocks = [
        " ".join(block.split()) for topic in sorted(help_texts) for block in re.split(r"\n\s*\n", help_texts[topic])
    ]
    return [block for block in blocks if re.fullmatch(r"[A-Z].*[.:]", block) and _is_prose(block)]


def _is_prose(block: str) -> bool:
    return sum(character.isalpha() or character == " " for character in block) / len(block) > _MIN_LETTERS


if __name__ == "__main__":
    Path(sys.argv[2]).write_text("\n".join(make_texts(int(sys.argv[1]))) + "\n")
