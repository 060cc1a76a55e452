"""What of an input travels to where its outputs are decoded: enough for the same result, and no text that decoding does
not read.
"""

from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    FeaturePooling,
    FeatureType,
    FillMaskInput,
    GenerationOptions,
    ImageClassificationInput,
    ImageEmbeddingInput,
    MultiVectorEmbeddingInput,
    QuestionAnsweringInput,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    SparseEmbeddingInput,
    SummarizationInput,
    TaskInput,
    TextClassificationInput,
    TextGenerationInput,
    TokenClassificationInput,
    TranslationInput,
    ZeroShotClassificationInput,
    ZeroShotImageClassificationInput,
    ZeroShotTokenClassificationInput,
)
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import Detokenizer
from tests.unit.model_specs import model_spec

_NONE = ScoreFunction.SCORE_FUNCTION_NONE
_TEXT = "unread"
_PLACES: Arrays = {
    "char_start": np.array([-1, 0, 3, -1]),
    "char_end": np.array([-1, 2, 5, -1]),
    "continues_word": np.zeros(4, np.int32),
}
_MASK: Arrays = {"place": np.array([0, 3], np.int32), "target_ids": np.array([4, 2], np.int32)}

_OPTIONS = ["top_k", "function", "dimensions", "skip_normalize", "pooling", "type"]
_OPTIONS += ["top_n", "multi_label", "allow_nested", "threshold", "ignore_labels", "options"]
_GENERATED: tuple[list[Arrays], list[Arrays]] = (
    [{"window": np.array([1], np.int32)}],
    [{"token_ids": np.array([2, 3, 4], np.int32), "finish_reason": np.array(3, np.int32)}],
)
_STOPS = GenerationOptions(stop_strings=["c"])


def _numbers(*shape: int) -> Array:
    numbers: Array = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    return numbers


# task → an input with every option that its decode reads, annotations, outputs. What nobody reads is _TEXT.
_CASES: dict[str, tuple[Any, list[Arrays], list[Arrays]]] = {
    "text_classification": (
        TextClassificationInput(text=_TEXT, text_pair=_TEXT, top_k=2, function=_NONE),
        [],
        [{"logits": _numbers(3)}],
    ),
    "image_classification": (
        ImageClassificationInput(image=_TEXT.encode(), top_k=2, function=_NONE),
        [],
        [{"logits": _numbers(3)}],
    ),
    "image_embedding": (
        ImageEmbeddingInput(image=_TEXT.encode(), dimensions=2, skip_normalize=True),
        [],
        [{"image_embedding": _numbers(4)}],
    ),
    "zero_shot_image_classification": (
        ZeroShotImageClassificationInput(image=_TEXT.encode(), hypothesis_template=_TEXT, candidate_labels=["a", "b"]),
        [],
        [{"embedding": number} for number in _numbers(3, 4)],
    ),
    "sentence_embedding": (
        SentenceEmbeddingInput(text=_TEXT, dimensions=2, skip_normalize=True),
        [],
        [{"sentence_embedding": _numbers(4)}],
    ),
    "sentence_similarity": (
        SentenceSimilarityInput(source=_TEXT, texts=[_TEXT], dimensions=2),
        [],
        [{"sentence_embedding": numbers} for numbers in _numbers(2, 4)],
    ),
    "feature_extraction": (
        FeatureExtractionInput(
            text=_TEXT, text_pair=_TEXT, pooling=FeaturePooling.FEATURE_POOLING_MEAN, type=FeatureType.FEATURE_TYPE_INT8
        ),
        [],
        [{"last_hidden_state": _numbers(5, 4)}],
    ),
    "sparse_embedding": (
        SparseEmbeddingInput(text=_TEXT, top_k=1, prompt_name=_TEXT),
        [],
        [{"sparse_embedding": _numbers(6)}],
    ),
    "multi_vector_embedding": (
        MultiVectorEmbeddingInput(text=_TEXT, is_query=True, type=FeatureType.FEATURE_TYPE_INT8),
        [],
        [{"token_embeddings": _numbers(5, 4)}],
    ),
    "rerank": (
        RerankInput(query=_TEXT, texts=[_TEXT] * 3, top_n=2, function=_NONE),
        [],
        [{"logits": number} for number in _numbers(3, 1)],
    ),
    "zero_shot_classification": (
        ZeroShotClassificationInput(
            text=_TEXT, hypothesis_template=_TEXT, candidate_labels=["a", "b"], multi_label=True
        ),
        [],
        [{"logits": number} for number in _numbers(2, 3)],
    ),
    "fill_mask": (FillMaskInput(text=_TEXT, targets=[_TEXT] * 2, top_k=1), [_MASK], [{"logits": _numbers(6)}]),
    "token_classification": (
        TokenClassificationInput(text="ab cd", ignore_labels=["a"]),
        [_PLACES],
        [{"logits": _numbers(4, 5)}],
    ),
    "zero_shot_token_classification": (
        ZeroShotTokenClassificationInput(
            text="ab cd", candidate_labels=["a", "b"], threshold=0.1, allow_nested=True, multi_label=True
        ),
        [{"char_start": np.array([0, 3], np.int32), "char_end": np.array([2, 5], np.int32)}],
        [{"logits": _numbers(6, 2, 64)}],
    ),
    "text_generation": (TextGenerationInput(prompt=_TEXT, options=_STOPS), *_GENERATED),
    "summarization": (SummarizationInput(text=_TEXT, options=_STOPS), *_GENERATED),
    "translation": (TranslationInput(text=_TEXT, options=_STOPS), *_GENERATED),
    "question_answering": (
        QuestionAnsweringInput(question="q", context="ab cd", top_k=3, max_answer_tokens=1, allow_no_answer=True),
        [_PLACES],
        [{"start_logits": _numbers(4), "end_logits": _numbers(4)}],
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_options_alone_decode_to_the_same_result(name: str) -> None:
    task, (input, annotations, outputs) = TASKS[name], _CASES[name]
    numbers = next(iter(outputs[0].values())).shape[-1]
    model = model_spec(name, labels=("a", "b", "c", "d", "e")[:numbers], tokens=tuple("uvwxyz"))

    def decoded(given: Any) -> Any:
        # Copies, as arrays of a stage are read once.
        copies = [{key: array.copy() for key, array in output.items()} for output in outputs]
        letters = Detokenizer(lambda token_ids: "".join("abcde"[token_id] for token_id in token_ids))
        further = (letters,) if task.generates else ()
        return task.decode(given, model, annotations, copies, *further)

    assert decoded(_options(name, input)) == decoded(input)
    if _bare(input) != input:  # it has options
        assert decoded(input) != decoded(_bare(input))


@pytest.mark.parametrize("name", TASKS)
def test_texts_that_decoding_does_not_read_are_left_out(name: str) -> None:
    assert _TEXT.encode() not in _options(name, _CASES[name][0]).SerializeToString()


def test_options_are_made_without_a_copy_of_a_text_that_decoding_reads() -> None:
    for name in ("question_answering", "token_classification", "zero_shot_token_classification"):
        input = TaskInput(**{name: _CASES[name][0]})
        assert TASKS[name].decoding_part(input) is input


def _options(name: str, input: Any) -> Any:
    part = TASKS[name].decoding_part(TaskInput(**{name: input}))
    assert part.WhichOneof("task") == name
    return getattr(part, name)


def _bare(input: Any) -> Any:
    """The input with the options unset, so that the case is known to depend on them."""
    bare = type(input)()
    bare.CopyFrom(input)
    for field in _OPTIONS:
        if field in bare.DESCRIPTOR.fields_by_name:
            bare.ClearField(field)
    return bare
