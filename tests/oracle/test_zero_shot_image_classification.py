"""Zero-shot image classification equals ZeroShotImageClassificationPipeline, and the vectors of its bundle those of
transformers' models, through four processes.
"""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from neuronpipe.api.v1.tasks_pb2 import (
    ImageEmbeddingInput,
    SentenceEmbeddingInput,
    TaskInput,
    ZeroShotImageClassificationInput,
)
from tests.models.images import IMAGE_TEXT_FAMILIES, image_files, make_image_text_source
from tests.oracle.comparison import scored
from tests.oracle.conftest import Suite
from tests.oracle.serving import Served

_MAX_TOKENS = 64  # to which the pipeline pads the texts of SigLIP, whatever its tokenizer says
_LABELS = (["a cat", "a dog"], ["a ferry"], ["bread", "une montagne", "猫", "a", "trains that leave at nine"])
_TEMPLATES = (None, "{}", "It shows {}, or so they say.")
_TOLERANCE = 2e-5
TASK = "zero_shot_image_classification"
pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:.*use_fast"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("image-text-models")
    return {family: make_image_text_source(folder / family, family, _MAX_TOKENS) for family in IMAGE_TEXT_FAMILIES}


@pytest.mark.parametrize("model", IMAGE_TEXT_FAMILIES)
async def test_labels_equal_those_of_transformers(model: str, suite: Suite, sources: Mapping[str, Path]) -> None:
    compared = suite.comparison(
        f"zero_shot_image_classification-{model}",
        f"ZeroShotImageClassificationPipeline, transformers {transformers.__version__}",
    )
    pipeline = _pipeline(sources[model])
    turns = itertools.cycle(itertools.product(_LABELS, _TEMPLATES))
    cases = [(*file, *turn) for file, turn in zip(image_files(every=10), turns, strict=False)]

    def make(case: tuple[str, bytes, Sequence[str], str | None]) -> TaskInput:
        _, data, labels, template = case
        input = ZeroShotImageClassificationInput(
            image=data, candidate_labels=labels, hypothesis_template=template or ""
        )
        return TaskInput(zero_shot_image_classification=input)

    answers = await suite.answers(model, cases, lambda case: (len(case[2]), case[3]), make, at_least=60)
    for (description, data, labels, template), answer in answers:
        given = {"hypothesis_template": template} if template else {}
        expected = pipeline(Image.open(io.BytesIO(data)), candidate_labels=labels, **given)
        ours = scored(answer.result.zero_shot_image_classification.labels)
        compared.compare_ranked((description, labels, template), ours, expected)
    compared.check(at_least=suite.drawn)


@pytest.mark.parametrize("model", IMAGE_TEXT_FAMILIES)
async def test_vectors_equal_those_of_transformers(model: str, served: Served, sources: Mapping[str, Path]) -> None:
    pipeline = _pipeline(sources[model])
    images = [data for _, data in image_files(every=80)]
    texts = ["a", "A photo of a ferry, at half past nine.", "Une photo, 北京."]
    inputs = [
        *(TaskInput(image_embedding=ImageEmbeddingInput(image=data, skip_normalize=True)) for data in images),
        *(TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, skip_normalize=True)) for text in texts),
    ]
    results = [outcome.response.result for outcome in await served.infer_all(model, inputs)]
    with torch.inference_mode():
        for data, result in zip(images, results, strict=False):
            pixels = pipeline.image_processor(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="pt")
            _assert_equal(result.image_embedding.embedding, pipeline.model.get_image_features(**pixels))
        for text, result in zip(texts, results[len(images) :], strict=True):
            padding = "max_length" if model == "SigLIP" else "longest"
            ids = pipeline.tokenizer([text], padding=padding, max_length=_MAX_TOKENS, return_tensors="pt")
            _assert_equal(result.sentence_embedding.embedding, pipeline.model.get_text_features(**ids))


def _pipeline(source: Path) -> Any:
    is_4 = transformers.__version__.startswith("4.")
    processor = transformers.AutoImageProcessor.from_pretrained(source, **({} if is_4 else {"backend": "pil"}))
    return transformers.pipeline(
        "zero-shot-image-classification", model=str(source), image_processor=processor, device="cpu"
    )


def _assert_equal(ours: Any, features: Any) -> None:
    expected = getattr(features, "pooler_output", features)[0].numpy()
    np.testing.assert_allclose(np.array(ours), expected, rtol=0, atol=_TOLERANCE * np.abs(expected).max())
