"""compiler/accuracy.py: agreement and the limits on it, with numbers that can be checked by hand."""

from typing import Any

import numpy as np
import pytest

from neuronpipe.bundles.manifest import Accuracy
from neuronpipe.compiler import accuracy
from neuronpipe.compiler.accuracy import agreement
from neuronpipe.core.errors import SetupError


def _batch(*lengths: int) -> dict[str, Any]:
    mask = np.array([[1] * length + [0] * (max(lengths) - length) for length in lengths], np.int64)
    return {"input_ids": mask, "attention_mask": mask}


def _array(*rows: list[float]) -> Any:
    return np.array(rows, np.float32)


def test_labels_agree_where_the_best_is_the_same() -> None:
    outputs = [{"logits": _array([1, 5, 2], [3, 2, 1])}, {"logits": _array([-1, -2, -3], [0, 1, 9])}]
    reference = [{"logits": _array([0, 1, 0], [2, 3, 1])}, {"logits": _array([9, 8, 7], [1, 2, 3])}]
    # Best labels 1 0 | 0 2 against 1 1 | 0 2: three of four.
    assert agreement("text_classification", outputs, reference, [_batch(2, 2), _batch(2, 2)]) == 0.75


def test_every_text_counts_the_same_whatever_its_batch() -> None:
    outputs = [{"logits": _array([1, 0])}, {"logits": _array([1, 0], [1, 0], [1, 0])}]
    reference = [{"logits": _array([0, 1])}, {"logits": _array([1, 0], [1, 0], [1, 0])}]
    # Three of four texts; the mean of the batches' means would be one half.
    assert agreement("text_classification", outputs, reference, [_batch(1), _batch(1, 1, 1)]) == 0.75


def test_model_with_one_label_has_no_agreement() -> None:
    outputs = [{"logits": _array([1], [2])}]
    assert agreement("text_classification", outputs, outputs, [_batch(1, 1)]) is None


def test_answers_agree_where_both_start_and_end_are_the_same() -> None:
    starts, ends = (
        _array([0, 9, 1], [0, 9, 1], [0, 9, 1], [5, 9, 1]),
        _array([0, 1, 9], [0, 1, 9], [0, 1, 9], [0, 1, 9]),
    )
    expected_starts, expected_ends = (
        _array([0, 2, 1], [3, 2, 1], [0, 2, 1], [3, 2, 1]),
        _array([0, 1, 2], [0, 1, 2], [3, 1, 2], [3, 1, 2]),
    )
    # Starts 1 1 1 1 against 1 0 1 0, ends 2 2 2 2 against 2 2 0 0: both are the same in the first text only.
    outputs = [{"start_logits": starts, "end_logits": ends}]
    reference = [{"start_logits": expected_starts, "end_logits": expected_ends}]
    assert agreement("question_answering", outputs, reference, [_batch(3, 3, 3, 3)]) == 0.25


def test_answers_in_the_padding_do_not_count() -> None:
    outputs = [{"start_logits": _array([0, 1, 9], [0, 1, 9]), "end_logits": _array([0, 1, 9], [0, 1, 9])}]
    reference = [{"start_logits": _array([0, 1, 0], [0, 1, 9]), "end_logits": _array([0, 1, 0], [0, 1, 9])}]
    assert agreement("question_answering", outputs, reference, [_batch(2, 3)]) == 1


def test_embeddings_agree_as_much_as_the_worst_does_whatever_their_lengths() -> None:
    outputs = [{"sentence_embedding": _array([2, 0], [3, 4])}, {"sentence_embedding": _array([5, 5])}]
    reference = [{"sentence_embedding": _array([7, 0], [1, 0])}, {"sentence_embedding": _array([1, 1])}]
    # Cosines: 1; 3 / 5; 1.
    assert agreement("sentence_embedding", outputs, reference, [_batch(1, 1), _batch(1)]) == pytest.approx(
        0.6, abs=1e-12
    )


@pytest.mark.parametrize("vector", [[-1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], ids=["opposite", "unrelated", "zero"])
def test_embeddings_that_have_nothing_in_common_agree_by_zero(vector: list[float]) -> None:
    outputs = [{"sentence_embedding": _array(vector)}]
    assert agreement("sentence_embedding", outputs, [{"sentence_embedding": _array([1, 0])}], [_batch(1)]) == 0


def _measured(**changes: Any) -> Accuracy:
    described: dict[str, Any] = {
        "samples": 4,
        "sample_shapes": ((4, 3),),
        "largest_output": 1.0,
        "largest_difference": 0.25,
        "computed_dtype": "int8",
        "agreement": 0.75,
    }
    return Accuracy(**described | changes)


def test_artefact_at_its_limits_is_kept() -> None:
    accuracy.check(_measured(), max_divergence=0.25, min_agreement=0.75)
    accuracy.check(_measured(), None, None)
    accuracy.check(None, None, None)


@pytest.mark.parametrize(
    ("measured", "limits", "message"),
    [
        (
            _measured(),
            (0.2, None),
            r"differs from PyTorch float32 by 2.50e-01, the limit is 2.00e-01 \(--max-divergence\)",
        ),
        (_measured(), (None, 0.8), r"agreement with PyTorch float32 is 0.75, the limit is 0.8 \(--min-agreement\)"),
        (_measured(emulated_agreement=0.5), (None, 0.75), "is 0.5, the limit is 0.75"),
        (_measured(emulated_difference=0.5), (0.25, None), "by 5.00e-01, the limit is 2.50e-01"),
        (_measured(agreement=None), (None, 0.5), "a model with one label has no agreement"),
        (_measured(largest_difference=float("nan")), (None, None), "are NaN or infinite"),
        (_measured(emulated_difference=float("nan")), (None, None), "are NaN or infinite"),
        (None, (1.0, None), "not compared with PyTorch; leave out --max-divergence"),
        (None, (None, 0.1), "not compared with PyTorch; leave out --max-divergence"),
    ],
)
def test_artefact_beyond_a_limit_is_refused_with_both_numbers(
    measured: Accuracy | None, limits: tuple[float | None, float | None], message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        accuracy.check(measured, *limits)
