"""tasks/result_agreement.py: how far two results agree, computed by hand."""

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    EmbeddingPrecision,
    Entity,
    FeatureExtractionResult,
    FeatureType,
    FilledMask,
    LabelScore,
    TaskInput,
    TaskResult,
    TokenScore,
    TokenWeight,
)
from neuronpipe.tasks import ANSWERED_TASKS
from neuronpipe.tasks.result_agreement import _MEASURES, result_agreement
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_input, task_result


def _labels(*labels: str) -> TaskResult:
    scores = [LabelScore(label=label, score=1) for label in labels]
    return task_result(text_classification={"labels": scores})


def _embedding(*numbers: float) -> TaskResult:
    return task_result(sentence_embedding={"embedding": numbers})


def _two_embeddings(*numbers: float) -> TaskResult:
    return task_result(sentence_embedding={"embedding": numbers, "vectors": 2})


def _bits(*octets: int) -> TaskResult:
    ubinary = EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY
    return task_result(sentence_embedding={"packed": bytes(octets), "precision": ubinary})


def _vectors(vectors: list[list[float]], kind: "FeatureType.ValueType", dtype: str) -> TaskResult:
    data = np.array(vectors, dtype)
    result = FeatureExtractionResult(data=data.tobytes(), shape=data.shape, type=kind)
    return TaskResult(feature_extraction=result)


def _entities(*places: tuple[str, int, int]) -> TaskResult:
    entities = [Entity(label=label, start=start, end=end) for label, start, end in places]
    return task_result(token_classification={"entities": entities})


def _masks(*tokens: int) -> TaskResult:
    masks = [FilledMask(tokens=[TokenScore(token_id=token)]) for token in tokens]
    return task_result(fill_mask={"masks": masks})


def _weights(**weights: float) -> TaskResult:
    found = [TokenWeight(token_id=int(name[1:]), weight=weight) for name, weight in weights.items()]
    return task_result(sparse_embedding={"weights": found})


def _answer(start: int, end: int) -> TaskResult:
    return task_result(question_answering={"answers": [{"start": start, "end": end}]})


def _ranked(*indices: int) -> TaskResult:
    return task_result(rerank={"texts": [{"index": index} for index in indices]})


def _scores(*scores: float) -> TaskResult:
    return task_result(sentence_similarity={"scores": scores})


def _summary(*token_ids: int) -> TaskResult:
    return task_result(summarization={"sequences": [{"token_ids": token_ids}]})


def _steps(precision: "EmbeddingPrecision.ValueType", packed: bytes) -> TaskResult:
    return task_result(sentence_embedding={"packed": packed, "precision": precision})


_INT8_STEPS = EmbeddingPrecision.EMBEDDING_PRECISION_INT8
_UINT8_STEPS = EmbeddingPrecision.EMBEDDING_PRECISION_UINT8
_FLOAT, _INT8 = FeatureType.FEATURE_TYPE_FLOAT32, FeatureType.FEATURE_TYPE_INT8


@pytest.mark.parametrize(
    ("result", "other", "expected"),
    [
        (_labels("a", "b"), _labels("a", "c"), 1.0),
        (_labels("a", "b"), _labels("b", "a"), 0.0),
        (_embedding(1, 0), _embedding(3, 4), 0.6),  # (1 x 3) / (1 x 5)
        (_embedding(1, 0), _embedding(-1, 0), 0.0),
        # The second vectors: (1 x 3) / (1 x 5). All four numbers as one vector: 4 / 7.2.
        (_two_embeddings(1, 0, 1, 0), _two_embeddings(1, 0, 3, 4), 0.6),
        (_two_embeddings(1, 0, 1, 0), _embedding(1, 0, 1, 0), 0.0),
        (_embedding(1, 0), _embedding(1, 0, 0), 0.0),
        (_bits(0b11110000), _bits(0b11110001), 0.75),  # 7 bits of 8 are the same, one is not: (7 - 1) / 8
        (_steps(_INT8_STEPS, b"\x7f\x80"), _steps(_INT8_STEPS, b"\x7f\x7f"), 0.0),
        (_steps(_UINT8_STEPS, b"\xff\x00"), _steps(_UINT8_STEPS, b"\xff\x00"), 1.0),
        (_vectors([[1, 0], [1, 0]], _FLOAT, "<f4"), _vectors([[2, 0], [3, 4]], _FLOAT, "<f4"), 0.6),
        (_vectors([[127, 0]], _INT8, "i1"), _vectors([[3, 4]], _INT8, "i1"), 0.6),
        (_entities(("PER", 0, 3), ("LOC", 5, 8)), _entities(("PER", 0, 3), ("ORG", 5, 8)), 1 / 3),
        (_entities(), _entities(), 1.0),
        (_masks(4, 7), _masks(4, 8), 0.5),
        (_weights(t1=3.0, t2=4.0), _weights(t1=5.0), 0.6),  # 15 / (5 x 5)
        (_weights(), _weights(), 1.0),
        (_answer(3, 9), _answer(3, 9), 1.0),
        (_answer(3, 9), _answer(3, 8), 0.0),
        (_ranked(2, 0, 1), _ranked(2, 1, 0), 1.0),
        (_scores(0.9, 0.5), _scores(0.8, 0.75), 0.75),
        (_summary(1, 2, 3, 4), _summary(1, 2, 5), 0.5),
        (
            task_result(tokenization={"tokens": [{"token_id": 1}, {"token_id": 2}]}),
            task_result(tokenization={"tokens": [{"token_id": 1}, {"token_id": 3}]}),
            0.5,
        ),
        (task_result(detokenization={"text": "a"}), task_result(detokenization={"text": "b"}), 0.0),
        (_labels("a"), _scores(1), 0.0),
        (TaskResult(), TaskResult(), 0.0),
    ],
)
def test_agreement_is_what_the_task_compares(result: TaskResult, other: TaskResult, expected: float) -> None:
    task = result.WhichOneof("task") or "text_classification"
    model = model_spec(task if task in ("text_classification", "summarization") else "text_classification")
    assert result_agreement(TaskInput(), model, result, other) == pytest.approx(expected)
    assert result_agreement(TaskInput(), model, other, result) == pytest.approx(expected)


def test_every_task_has_a_measure() -> None:
    fields = {getattr(TaskResult(), task).DESCRIPTOR.fields[0].name for task in ANSWERED_TASKS}
    assert fields - _MEASURES.keys() == {"text"}, "these agree where they are equal"


def test_a_classifier_with_one_label_has_no_agreement() -> None:
    assert result_agreement(TaskInput(), model_spec(labels=("a",)), _labels("a"), _labels("a")) is None


def test_texts_that_are_drawn_at_random_have_no_agreement() -> None:
    text = task_result(text_generation={"sequences": [{"token_ids": [1]}]})
    drawn = task_input(text_generation={"prompt": "a"})
    assert result_agreement(drawn, model_spec("text_generation"), text, text) == 1.0
    drawn.text_generation.options.do_sample = True
    assert result_agreement(drawn, model_spec("text_generation"), text, text) is None
