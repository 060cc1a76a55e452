"""Prompts of a wanted length, made of words whose tokens the gateway has counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TokenizationInput
from neuronpipe.client import Client
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.measure.load.request import LoadRequest

# So many texts have enough different words.
_COUNTED_TEXTS = 64
_LIMIT_S = 10.0


@dataclass(frozen=True)
class Words:
    """Words, and how many tokens each is within a text."""

    words: Sequence[str]
    tokens: Sequence[int]


class PromptMaker:
    """Makes prompts of random words, no two of them alike, so that only what shall be shared is in a prefix cache."""

    def __init__(self, words: Words, seed: Sequence[int]) -> None:
        self._random = np.random.default_rng(seed)
        self._words = np.array(words.words)
        self._tokens = np.array(words.tokens)
        self._short = self._words[self._tokens == self._tokens.min()]
        self._shortest = int(self._tokens.min())

    def make(self, tokens: int) -> str:
        """A prompt. A tokenizer that joins words may make a few tokens more or less of it."""
        drawn = self._random.integers(len(self._words), size=tokens)
        kept = drawn[np.cumsum(self._tokens[drawn]) <= tokens]
        missing = (tokens - int(self._tokens[kept].sum())) // self._shortest
        return " ".join([*self._words[kept], *self._random.choice(self._short, missing)])


def count_words(request: LoadRequest, texts: Sequence[str]) -> Words:
    """The words of some texts with their tokens, as the model's tokenizer has them. Raises SetupError."""
    texts = texts[:_COUNTED_TEXTS]
    inputs = (TaskInput(tokenization=TokenizationInput(text=text, skip_special_tokens=True)) for text in texts)
    requests = [InferRequest(model=request.model, version=request.version, input=input) for input in inputs]
    found: dict[str, int] = {}
    try:
        with Client(request.target, timeout_s=_LIMIT_S, tls=request.tls) as client:
            outcomes = client.infer_batch(requests)
    except NeuronpipeError as error:
        raise SetupError(f"--prompt-tokens: cannot count tokens: {error.reason}: {error.message}") from error
    for text, outcome in zip(texts, outcomes, strict=True):
        if outcome.HasField("response"):
            starts = [token.start for token in outcome.response.result.tokenization.tokens]
            found.update(_words_of(text, np.array(starts)))
    if not found:
        raise SetupError("--texts: has no text of several words, which prompts are made of")
    return Words([*found], [*found.values()])


def _words_of(text: str, starts: NDArray[np.int64]) -> Iterator[tuple[str, int]]:
    """The words of a text but for the first one, which has no space before it."""
    began = 0
    for word in text.split(" "):
        ended = began + len(word)
        # Of some tokenizers a token begins with the space before the word.
        tokens = int(np.count_nonzero((starts >= began - 1) & (starts < ended)))
        if began and word and tokens:
            yield word, tokens
        began = ended + 1
