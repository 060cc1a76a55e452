"""Parts of inputs and results that several protocols share: texts or token ids, vectors, and the places of tokens."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import Packed, pack_result
from neuronpipe.core.tensors import float_bytes, write_floats
from neuronpipe.tasks.many_texts import MAX_TEXTS
from neuronpipe.tasks.vectors import VECTOR_OPTIONS, check_vector_options, vectors_result

_NO_PLACE = (None, None)
# The characters of the texts that are one input together, whose tokens are far fewer than an input may have.
_MOST_CHARACTERS = 64 << 10
# The words of Voyage, Cohere and Jina for prompts: for a text to find others by, and for a text to be found.
_QUERY = dict.fromkeys(("query", "search_query", "retrieval.query"), "query")
_DOCUMENT = ("document", "passage", "corpus")
_FOUND = (*_DOCUMENT, "search_document", "retrieval.passage")
# The words of Voyage, Cohere and Jina for precisions. base64 is float32 in another form.
PRECISIONS: Mapping[str, "tasks.EmbeddingPrecision.ValueType"] = {
    "float": tasks.EMBEDDING_PRECISION_UNSPECIFIED,
    "int8": tasks.EMBEDDING_PRECISION_INT8,
    "uint8": tasks.EMBEDDING_PRECISION_UINT8,
    "binary": tasks.EMBEDDING_PRECISION_BINARY,
    "ubinary": tasks.EMBEDDING_PRECISION_UBINARY,
    "base64": tasks.EMBEDDING_PRECISION_UNSPECIFIED,
}
_SIGNED = (PRECISIONS["int8"], PRECISIONS["binary"])


def prompt_of_word(field: str, word: str, names: Sequence[str]) -> str:
    """Returns the name of the model's prompt that a caller's word in a field stands for; empty for the default prompt.

    As with sentence-transformers, a document gets the default prompt of a model that has a prompt for queries alone.
    Raises InvalidInput.
    """
    names_in_lower_case = {name.lower(): name for name in names}
    for candidate in (word, *(_DOCUMENT if word in _FOUND else (_QUERY.get(word, word),))):
        if candidate.lower() in names_in_lower_case:
            return names_in_lower_case[candidate.lower()]
    if word in _FOUND and any("query" in name for name in names_in_lower_case):
        return ""
    raise InvalidInput(field, f"is none of the model's prompts; they are: {', '.join(names) or 'none'}")


def token_places(text: str, tokens: Sequence[tasks.Token]) -> list[tuple[int, int] | tuple[None, None]]:
    """Returns the start and the end of each token in the text's UTF-8, in bytes; None for a special token.

    TEI passes on the offsets of the Rust library, which counts bytes (core/src/tokenization.rs, into_tokens).
    """
    if text.isascii():
        return [_NO_PLACE if token.is_special else (token.start, token.end) for token in tokens]
    before = [0, *accumulate(len(char.encode()) for char in text)]
    return [_NO_PLACE if token.is_special else (before[token.start], before[token.end]) for token in tokens]


def text_input(task: str, text: str, **options: Any) -> tasks.TaskInput:
    fields: Any = {"text": text, **options}
    return tasks.TaskInput(**{task: fields})


def embedding_input(value: str | list[int] | bytes, **options: Any) -> tasks.TaskInput:
    """Returns the input of an embedding of a text, its token ids, or an image, which takes only options of vectors."""
    if isinstance(value, str):
        return text_input("sentence_embedding", value, **options)
    if isinstance(value, bytes):
        of_vectors = {name: options[name] for name in VECTOR_OPTIONS if name in options}
        return tasks.TaskInput(image_embedding=tasks.ImageEmbeddingInput(image=value, **of_vectors))
    return tasks.TaskInput(sentence_embedding=tasks.SentenceEmbeddingInput(token_ids=value, **options))


def lists_of_texts(inputs: Sequence[tasks.TaskInput]) -> list[list[tasks.TaskInput]]:
    """Divides inputs, in their order, into lists of texts to embed with the same options, and other inputs alone."""
    lists, options, size = list[list[tasks.TaskInput]](), tasks.SentenceEmbeddingInput(), 0
    for input in inputs:
        own = tasks.SentenceEmbeddingInput()
        own.CopyFrom(input.sentence_embedding)
        own.text, length = "", len(input.sentence_embedding.text)
        if lists and size and size + length <= _MOST_CHARACTERS and len(lists[-1]) < MAX_TEXTS and own == options:
            lists[-1].append(input)
            size += length
        else:
            lists.append([input])
            options, size = own, 0 if own.token_ids or own.return_sparse or own.return_multi_vector else length
    return lists


def joined_texts(inputs: Sequence[tasks.TaskInput]) -> tasks.TaskInput:
    """Returns one input with the texts of inputs that have the same options."""
    joined = tasks.TaskInput()
    joined.sentence_embedding.CopyFrom(inputs[0].sentence_embedding)
    joined.sentence_embedding.text = ""
    joined.sentence_embedding.texts.extend([input.sentence_embedding.text for input in inputs])
    return joined


def results_of_texts(result: tasks.TaskResult, count: int) -> Iterator[Packed[tasks.TaskResult]]:
    """Yields the result of each text of an input with several."""
    together = result.sentence_embedding
    numbers = together.packed or float_bytes(together)
    size_bytes = len(numbers) // count
    for start in range(0, size_bytes * count, size_bytes):
        own, message = numbers[start : start + size_bytes], tasks.TaskResult()
        if together.packed:
            message.sentence_embedding.packed = own
            message.sentence_embedding.precision = together.precision
        else:
            write_floats(own, message.sentence_embedding)
        yield pack_result(message)


@dataclass(frozen=True, slots=True)
class VectorTypes:
    """The types in which a request wants each vector, and their options by the protocol's words for types.

    `whole`: the options of the input from whose vector all types are made. The vector is not scaled.
    """

    options: Mapping[str, tasks.SentenceEmbeddingInput]
    spec: ModelSpec
    whole: ClassVar[Mapping[str, Any]] = {"skip_normalize": True, "dimensions": 0}

    @classmethod
    def of(cls, words: Sequence[str], spec: ModelSpec, dimensions: int | None, *, skip_normalize: bool = False) -> Self:
        """Returns the types of these words."""
        options = {
            word: tasks.SentenceEmbeddingInput(
                dimensions=dimensions or 0, skip_normalize=skip_normalize, precision=PRECISIONS[word]
            )
            for word in words
        }
        return cls(options, spec)

    def check(self) -> None:
        """Raises InvalidInput for a type that the model's vectors cannot have."""
        for options in self.options.values():
            check_vector_options(options, self.spec)

    def write(
        self, result: tasks.SentenceEmbeddingResult | tasks.ImageEmbeddingResult, *, is_base64: bool = False
    ) -> dict[str, Any]:
        """Returns the vector in each type, as numbers. With `is_base64`, or for the type base64, as Base64."""
        whole, written = vector(result)[np.newaxis], dict[str, Any]()
        for word, options in self.options.items():
            converted = vectors_result(tasks.SentenceEmbeddingResult, whole, options, self.spec)
            written[word] = base64_of(converted) if is_base64 or word == "base64" else numbers(converted)
        return written


def embedding_of(result: tasks.TaskResult) -> tasks.SentenceEmbeddingResult | tasks.ImageEmbeddingResult:
    """Returns the vector of a text or an image."""
    return result.image_embedding if result.HasField("image_embedding") else result.sentence_embedding


def listed(inputs: Any) -> tuple[Sequence[Any], bool]:
    """Returns the inputs, and whether they are a list. A text, an object or a list of token ids is a single input."""
    if not isinstance(inputs, list) or (inputs and isinstance(inputs[0], int)):
        return [inputs], False
    return inputs, True


def vector(result: tasks.SentenceEmbeddingResult | tasks.ImageEmbeddingResult) -> NDArray[np.float32]:
    """Returns the vector, float32 [dimensions]."""
    return np.frombuffer(float_bytes(result), "<f4")


def numbers(result: tasks.SentenceEmbeddingResult | tasks.ImageEmbeddingResult) -> NDArray[Any]:
    """Returns the numbers of a vector of any precision: float32, int8 or uint8."""
    if not result.packed:
        return vector(result)
    return np.frombuffer(result.packed, np.int8 if result.precision in _SIGNED else np.uint8)


def base64_of(result: tasks.SentenceEmbeddingResult | tasks.ImageEmbeddingResult) -> str:
    """Returns the bytes of a vector's numbers, little-endian, in Base64."""
    return b64encode(result.packed or float_bytes(result)).decode()


def token_vectors(result: tasks.FeatureExtractionResult | tasks.MultiVectorEmbeddingResult) -> NDArray[np.float32]:
    """Returns the vectors of a result, float32 [tokens, width], or [width] for a single vector."""
    return np.frombuffer(result.data, "<f4").reshape(result.shape)
