"""Makes requests from texts, for the task of the model: the texts themselves, images, or prompts of a given length.

Texts are the lines of a file, or English text that comes with Python. Prompts are made of words whose tokens the
gateway has counted. Images are made with the standard library and NumPy.
"""

import random
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TokenizationInput, Truncation
from neuronpipe.client import Client
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.files import read_lines
from neuronpipe.core.task_inputs import FIELDS, GENERATING, NEEDED
from neuronpipe.measure.load.request import GenerationLoad, LoadRequest

_MAX_FILE_BYTES = 64 << 20

# Words and punctuation marks. With at most 120, no built-in text has more than 128 tokens of MiniLM's tokenizer.
_PIECE = re.compile(r"[^\W_]+|[^\w\s]|_")
_MIN_PIECES = 4
_MAX_PIECES = 120
# The share of texts with two sentences, which makes the mean 33 tokens of MiniLM's tokenizer.
_PAIRED = 0.2

_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r'(?<=[.!?]) (?=[A-Z"*])')
_RULE = re.compile(r"[=*\-~+^|# ]*")


def read_texts(path: Path) -> list[str]:
    """Reads the lines of a UTF-8 file that are not blank. Raises SetupError."""
    texts = [line.strip() for _, line in read_lines(path, "--texts", max_bytes=_MAX_FILE_BYTES)]
    if not texts:
        raise SetupError(f"--texts {path}: has no text")
    return texts


def builtin_texts(seed: int) -> list[str]:
    """Returns about 1,800 different texts of one or two sentences, shuffled. Equal seeds give equal texts.

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
    """Returns whether a paragraph is text: code and grammar are indented, headings underlined."""
    return not any(line.startswith("   ") or _RULE.fullmatch(line) for line in paragraph.splitlines())


def _is_of_length(text: str) -> bool:
    return _MIN_PIECES <= len(_PIECE.findall(text)) <= _MAX_PIECES


_HEIGHT, _WIDTH = 320, 480
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2
# These rows repeat within deflate's window of 32 KiB, so that the file takes 30 kB, like a photograph.
_LINES = 20


def make_image(text: str) -> bytes:
    """Makes a PNG file. Each text makes another image."""
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    lines = generator.integers(0, 256, (_LINES, _WIDTH * 3), np.uint8)
    rows = np.zeros((_HEIGHT, 1 + _WIDTH * 3), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = np.resize(lines, (_HEIGHT, _WIDTH * 3))
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, _RGB, 0, 0, 0)
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# This number of texts has enough different words.
_COUNTED_TEXTS = 64
_LIMIT_S = 10.0


@dataclass(frozen=True)
class Words:
    """Words, and the number of tokens of each within a text."""

    words: Sequence[str]
    tokens: Sequence[int]


class PromptMaker:
    """Makes prompts of random words, all different, so that a prefix cache shares only the intended prefix."""

    def __init__(self, words: Words, seed: Sequence[int]) -> None:
        self._random = np.random.default_rng(seed)
        self._words = np.array(words.words)
        self._tokens = np.array(words.tokens)
        self._short = self._words[self._tokens == self._tokens.min()]
        self._shortest = int(self._tokens.min())

    def make(self, tokens: int) -> str:
        """Makes a prompt. A tokenizer that joins words may make a few tokens more or less of it."""
        drawn = self._random.integers(len(self._words), size=tokens)
        fitting = drawn[np.cumsum(self._tokens[drawn]) <= tokens]
        missing = (tokens - int(self._tokens[fitting].sum())) // self._shortest
        return " ".join([*self._words[fitting], *self._random.choice(self._short, missing)])


def count_words(request: LoadRequest, texts: Sequence[str]) -> Words:
    """Returns the words of some texts with their tokens, as the model's tokenizer counts them. Raises SetupError."""
    texts = texts[:_COUNTED_TEXTS]
    inputs = (TaskInput(tokenization=TokenizationInput(text=text, skip_special_tokens=True)) for text in texts)
    requests = [InferRequest(model=request.model, version=request.version, input=input) for input in inputs]
    tokens_by_word: dict[str, int] = {}
    try:
        with Client(request.target, timeout_s=_LIMIT_S, tls=request.tls) as client:
            outcomes = client.infer_batch(requests)
    except NeuronpipeError as error:
        raise SetupError(f"--prompt-tokens: cannot count tokens: {error.reason}: {error.message}") from error
    for text, outcome in zip(texts, outcomes, strict=True):
        if outcome.HasField("response"):
            starts = [token.start for token in outcome.response.result.tokenization.tokens]
            tokens_by_word.update(_words_of(text, np.array(starts)))
    if not tokens_by_word:
        raise SetupError("--texts: has no text of several words, which prompts are made of")
    return Words([*tokens_by_word], [*tokens_by_word.values()])


def _words_of(text: str, starts: NDArray[np.int64]) -> Iterator[tuple[str, int]]:
    """Yields the words of a text except the first, which has no space before it."""
    began = 0
    for word in text.split(" "):
        ended = began + len(word)
        # In some tokenizers a token begins with the space before the word.
        tokens = int(np.count_nonzero((starts >= began - 1) & (starts < ended)))
        if began and word and tokens:
            yield word, tokens
        began = ended + 1


_QUESTION = "What is it that is described here?"
_CANDIDATE_LABELS = ("numbers", "text", "errors")
_CUT = Truncation.TRUNCATION_RIGHT
_NEW_TOKENS = 32

_PRIORITIES = {
    None: Priority.PRIORITY_UNSPECIFIED,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}


def check_task(request: LoadRequest, task: str) -> None:
    """Raises SetupError if no load can be made for the task, or if it does not generate as requested."""
    if request.generation and task not in GENERATING:
        raise SetupError(f"--generate: model {request.model} has the task {task}; it is for {', '.join(GENERATING)}")
    if task not in _LOADED:
        raise SetupError(f"--model {request.model}: has the task {task}; load is generated for {', '.join(_LOADED)}")


def make_requests(request: LoadRequest, task: str, texts: Sequence[str]) -> list[InferRequest]:
    return [_request(request, make_input(task, text)) for text in texts]


def generation_requests(
    request: LoadRequest,
    load: GenerationLoad,
    task: str,
    texts: Sequence[str],
    words: Words | None,
    seed: Sequence[int],
) -> Iterator[InferRequest]:
    """Yields requests for generated texts without end. `words`: for prompts that have lengths of their own."""
    random, repeated_texts = np.random.default_rng(seed), cycle(texts)
    maker = PromptMaker(words, seed) if words else None
    shared = PromptMaker(words, (request.seed,)).make(load.shared_prefix_tokens) if words else ""
    while True:
        text = maker.make(load.prompt_tokens.draw(random)) if maker and load.prompt_tokens else next(repeated_texts)
        tokens = load.output_tokens.draw(random)
        options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": load.num_beams}
        if load.json_schema:
            options["json_schema"] = load.json_schema
        prompt = f"{shared} {text}" if shared else text
        fields: Any = {NEEDED[task][0]: prompt, "truncation": _CUT, "options": options}
        yield _request(request, TaskInput(**{task: fields}))


def _request(request: LoadRequest, input: TaskInput) -> InferRequest:
    priority = _PRIORITIES[request.priority]
    return InferRequest(model=request.model, version=request.version, input=input, priority=priority)


def make_input(task: str, text: str) -> TaskInput:
    """Makes the input of a task: the text, or an image made of it, and other needed fields. Raises SetupError for a
    task whose inputs are neither.
    """
    if task not in _LOADED:
        raise SetupError(f"the task {task}; load is generated for {', '.join(_LOADED)}")
    fields: dict[str, Any] = {name: _filled(name, text) for name in NEEDED[task]}
    task_fields = getattr(TaskInput(), task).DESCRIPTOR.fields_by_name
    further = {"truncation": _CUT, "options": {"max_new_tokens": _NEW_TOKENS}}
    message_fields: Any = {task: fields | {name: value for name, value in further.items() if name in task_fields}}
    return TaskInput(**message_fields)  # protobuf makes messages of dictionaries


def _filled(name: str, text: str) -> Any:
    if name in ("question", "source", "query"):
        return _QUESTION
    if name == "candidate_labels":
        return _CANDIDATE_LABELS
    kind = FIELDS[name].kind
    return make_image(text) if kind == "image" else [text] if kind == "texts" else text


_LOADED = [task for task, needed in NEEDED.items() if all(FIELDS[name].is_input for name in needed)]
