"""Real English of mixed length: what the benchmarks send. Sentences and short paragraphs of Python's own help texts."""

import itertools
import pydoc_data.topics
import random
import re

import transformers

from demo.model import find_minilm

MAX_TOKENS = 128
_SEED = 20261121
_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
_MIN_LETTERS = 0.85
_MIN_CHARACTERS = 20


def make_texts(count: int) -> list[str]:
    """`count` texts of 6 to 128 tokens, mean about 33, the same ones in every run; they repeat after some 2,000."""
    paragraphs = list(_paragraphs())
    sentences = [sentence for paragraph in paragraphs for sentence in _SENTENCE_END.split(paragraph) if len(sentence) > _MIN_CHARACTERS]
    # Half of the paragraphs lift the mean from a sentence's 29 tokens to what short user texts have.
    chooser = random.Random(_SEED)
    candidates = sorted({*sentences, *chooser.sample(paragraphs, len(paragraphs) // 2)})
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_minilm())
    lengths = [len(ids) for ids in tokenizer(candidates, verbose=False)["input_ids"]]
    texts = [text for text, length in zip(candidates, lengths, strict=True) if length <= MAX_TOKENS]
    chooser.shuffle(texts)
    return list(itertools.islice(itertools.cycle(texts), count))


def _paragraphs() -> list[str]:
    """Paragraphs of prose: no headings, no code, no grammar."""
    help_texts: dict[str, str] = pydoc_data.topics.topics
    blocks = [" ".join(block.split()) for topic in sorted(help_texts) for block in re.split(r"\n\s*\n", help_texts[topic])]
    return [block for block in blocks if re.fullmatch(r"[A-Z].*[.:]", block) and _is_prose(block)]


def _is_prose(block: str) -> bool:
    return sum(character.isalpha() or character == " " for character in block) / len(block) > _MIN_LETTERS
