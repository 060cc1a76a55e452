"""Image classification equals ImageClassificationPipeline, through four processes."""

import io
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, ScoreFunction, TaskInput
from tests.models.images import IMAGE_FAMILIES, image_files, make_image_source
from tests.models.repository import named_labels
from tests.oracle.comparison import scored
from tests.oracle.conftest import Suite

_LABELS = ["cat", "dog", "train", "mountain", "bread", "ferry", "owl"]
_FUNCTIONS = {
    None: ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
    "softmax": ScoreFunction.SCORE_FUNCTION_SOFTMAX,
    "sigmoid": ScoreFunction.SCORE_FUNCTION_SIGMOID,
    "none": ScoreFunction.SCORE_FUNCTION_NONE,
}
_TOP_KS = (None, 1, 3, 7)
TASK = "image_classification"
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:.*use_fast"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("image-models")
    labels = named_labels(_LABELS)
    made = {family: make_image_source(folder / family, family, **labels) for family in IMAGE_FAMILIES}
    multi_label = {**labels, "problem_type": "multi_label_classification"}
    return made | {
        "multi-label": make_image_source(folder / "multi-label", "ViT", **multi_label),
        "one-label": make_image_source(folder / "one-label", "ViT", **named_labels(["cat"])),
    }


def _cases(labels: int) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Images of every kind, with the pipeline's options in turns."""
    options = itertools.cycle(itertools.product(_TOP_KS, _FUNCTIONS))
    for (description, data), (top_k, function) in zip(image_files(every=5), options, strict=False):
        yield description, data, {"top_k": top_k and min(top_k, labels), "function_to_apply": function}


@pytest.mark.parametrize("model", [*IMAGE_FAMILIES, "multi-label", "one-label"])
async def test_labels_equal_those_of_transformers(model: str, suite: Suite, sources: Mapping[str, Path]) -> None:
    compared = suite.comparison(
        f"image_classification-{model}", f"ImageClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = transformers.pipeline("image-classification", model=str(sources[model]), device="cpu")
    cases = _cases(pipeline.model.config.num_labels)
    answers = await suite.answers(
        model, cases, lambda case: case[2], lambda case: _input(case[1], **case[2]), at_least=100
    )
    for (description, data, options), answer in answers:
        ours = scored(answer.result.image_classification.labels)
        given = {name: value for name, value in options.items() if value is not None}
        compared.compare_ranked((description, options), ours, pipeline(Image.open(io.BytesIO(data)), **given))
    compared.check(at_least=suite.drawn)


def _input(image: bytes, *, top_k: int | None, function_to_apply: str | None) -> TaskInput:
    input = ImageClassificationInput(image=image, top_k=top_k or 0, function=_FUNCTIONS[function_to_apply])
    return TaskInput(image_classification=input)
