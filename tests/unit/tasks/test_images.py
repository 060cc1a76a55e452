"""tasks/images.py, classification: what is refused, what is encoded, and how many labels there are."""

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, ScoreFunction, TaskInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.images import CLASSIFICATION as TASK
from tests.unit.model_specs import image_spec

_MODEL = image_spec()
_NONE = ScoreFunction.SCORE_FUNCTION_NONE


def _labels(input: ImageClassificationInput, *logits: float, labels: tuple[str, ...] = _MODEL.labels) -> list[str]:
    result = TASK.decode(input, image_spec(labels=labels), [], [{"logits": np.array(logits, np.float32)}])
    return [f"{label.label} {label.score:g}" for label in result.labels]


@pytest.mark.parametrize(
    ("input", "message"),
    [
        (ImageClassificationInput(), "image: is empty"),
        (ImageClassificationInput(image=b"x", top_k=4), "top_k: 4, the model has 3 labels"),
        (ImageClassificationInput(image=b"x", function=9), "function: 9 is not known"),  # type: ignore[arg-type]
    ],
)
def test_what_could_mean_nothing_is_refused(input: ImageClassificationInput, message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{message}$"):
        TASK.check(input, _MODEL)


def test_an_image_is_one_sequence_of_pixels() -> None:
    pixels = np.ones((3, 32, 48), np.uint8)
    read = {b"file": pixels}
    encoded = TASK.encode(ImageClassificationInput(image=b"file"), read.__getitem__, _MODEL)
    assert [list(sequence) for sequence in encoded.sequences] == [["pixels"]]
    assert encoded.sequences[0]["pixels"] is pixels


def test_the_best_five_labels_come_first_unless_asked_for_more() -> None:
    labels = tuple("abcdefg")
    logits = (1, 7, 3, 5, 2, 6, 4)
    expected = ["b 7", "f 6", "d 5", "g 4", "c 3"]
    assert _labels(ImageClassificationInput(function=_NONE), *logits, labels=labels) == expected
    assert len(_labels(ImageClassificationInput(top_k=7), *logits, labels=labels)) == 7
    assert _labels(ImageClassificationInput(function=_NONE, top_k=1), *logits, labels=labels) == ["b 7"]


def test_a_model_of_fewer_labels_gives_all() -> None:
    assert _labels(ImageClassificationInput(function=_NONE), 1, 3, 2) == ["b 3", "c 2", "a 1"]


def test_labels_of_equal_score_stay_in_the_models_order_also_where_they_are_cut() -> None:
    assert _labels(ImageClassificationInput(function=_NONE, top_k=2), 1, 1, 1) == ["a 1", "b 1"]


def test_the_image_is_not_sent_to_where_nobody_needs_it() -> None:
    input = TaskInput(image_classification=ImageClassificationInput(image=b"file", top_k=2, function=_NONE))
    assert TASK.decoding_part(input).image_classification == ImageClassificationInput(top_k=2, function=_NONE)


def test_images_are_encoded_alike_where_their_bytes_are_equal() -> None:
    traits, same, other = (
        TASK.traits(ImageClassificationInput(image=image, top_k=k)) for image, k in ((b"a", 1), (b"a", 2), (b"b", 1))
    )
    assert traits == same != other
