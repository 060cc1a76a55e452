"""Image classification equals ImageClassificationPipeline, through four processes."""

import io
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import transformers
from PIL import Image

from neuronpipe.api.v1.inference_pb2 import InferOutcome
from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, ScoreFunction, TaskInput
from tests.models.images import IMAGE_FAMILIES, image_files, make_image_source
from tests.oracle.comparison import Comparison
from tests.oracle.serving import Served, serving
from tests.suite.sampling import Sample

_LABELS = ["cat", "dog", "train", "mountain", "bread", "ferry", "owl"]
_FUNCTIONS = {
    None: ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
    "softmax": ScoreFunction.SCORE_FUNCTION_SOFTMAX,
    "sigmoid": ScoreFunction.SCORE_FUNCTION_SIGMOID,
    "none": ScoreFunction.SCORE_FUNCTION_NONE,
}
_TOP_KS = (None, 1, 3, 7)
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:.*use_fast"),
]


@pytest.fixture(scope="module")
def image_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("image-models")
    labels: dict[str, Any] = {
        "id2label": dict(enumerate(_LABELS)),
        "label2id": {label: index for index, label in enumerate(_LABELS)},
    }
    sources = {family: make_image_source(folder / family, family, **labels) for family in IMAGE_FAMILIES}
    multi_label = {**labels, "problem_type": "multi_label_classification"}
    return sources | {
        "multi-label": make_image_source(folder / "multi-label", "ViT", **multi_label),
        "one-label": make_image_source(folder / "one-label", "ViT", id2label={0: "cat"}, label2id={"cat": 0}),
    }


@pytest_asyncio.fixture(scope="module")
async def served(
    asked: Set[str], image_sources: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    sources = {name: ("image_classification", source) for name, source in image_sources.items() if name in asked}
    async with serving(tmp_path_factory.mktemp("repository"), sources) as running:
        yield running


def _cases(labels: int) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Images of every kind, with the pipeline's options in turns."""
    options = itertools.cycle(itertools.product(_TOP_KS, _FUNCTIONS))
    for (description, data), (top_k, function) in zip(image_files(every=5), options, strict=False):
        yield description, data, {"top_k": top_k and min(top_k, labels), "function_to_apply": function}


@pytest.mark.parametrize("model", [*IMAGE_FAMILIES, "multi-label", "one-label"])
async def test_labels_equal_those_of_transformers(
    model: str,
    served: Served,
    image_sources: Mapping[str, Path],
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
) -> None:
    compared = comparison(
        f"image_classification-{model}", f"ImageClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = transformers.pipeline("image-classification", model=str(image_sources[model]), device="cpu")
    cases = sample.draw(_cases(pipeline.model.config.num_labels), lambda case: case[2], at_least=100)
    outcomes = await served.infer_all(model, [_input(data, **options) for _, data, options in cases])
    for (description, data, options), outcome in zip(cases, outcomes, strict=True):
        given = {name: value for name, value in options.items() if value is not None}
        compared.compare_ranked(
            (description, options), _labels(outcome), pipeline(Image.open(io.BytesIO(data)), **given)
        )
    compared.check(at_least=len(cases))


def _input(image: bytes, *, top_k: int | None, function_to_apply: str | None) -> TaskInput:
    input = ImageClassificationInput(image=image, top_k=top_k or 0, function=_FUNCTIONS[function_to_apply])
    return TaskInput(image_classification=input)


def _labels(outcome: InferOutcome) -> list[dict[str, Any]]:
    assert outcome.HasField("response"), outcome.error.message
    return [{"label": one.label, "score": one.score} for one in outcome.response.result.image_classification.labels]
