"""The compile step on models of images: what it finds by itself, what it stores, and what it refuses."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, TaskInput
from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import BucketRequest, CompileRequest, compile_bundle
from neuronpipe.core.errors import SetupError
from tests.contract.inference import infer_all
from tests.models.images import image_files, make_image_source
from tests.models.repository import for_neuron

pytestmark = pytest.mark.sampled

_LABELS = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_source(tmp_path_factory.mktemp("vit") / "source", "ViT", **_LABELS)


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """64 different images in files."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    generator = np.random.default_rng(7)
    for number in range(64):
        patches = Image.fromarray(generator.integers(0, 256, (4, 5, 3), np.uint8))
        patches.resize((40, 50)).save(folder / f"{number:02}.png")
    return folder


@pytest.fixture
def compiled(source: Path, tmp_path: Path) -> Callable[..., Bundle]:
    """Compiles the model; keyword arguments change the request."""

    def run(**changes: Any) -> Bundle:
        request = CompileRequest(str(source), "image_classification", tmp_path / "repository", "model", backend="fake")
        return compile_bundle(dataclasses.replace(request, **changes), lambda line: None)

    return run


def test_the_task_the_labels_and_the_images_are_found_by_the_models_files(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled(task="")
    spec = bundle.spec
    assert (spec.task, spec.labels) == ("image_classification", ("cat", "dog"))
    assert (spec.inputs, spec.max_tokens) == (("pixels",), 4)
    assert spec.image is not None
    assert spec.image.size == (32, 32)


def test_a_bundle_of_images_has_no_tokenizer(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled()
    assert bundle.manifest.tokenizer_file == ""
    assert bundle.manifest.files == {}


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_the_artefact_is_compared_on_images(backend: str, compiled: Callable[..., Bundle]) -> None:
    accuracy = compiled(backend=backend).manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert (accuracy.samples, accuracy.agreement) == (32, 1.0)
    assert accuracy.sample_shapes == ((5, 4), (1, 4), (8, 4), (8, 4), (8, 4), (2, 4))
    assert accuracy.largest_difference < 5e-5


def test_weights_of_eight_bits_are_compared_on_images_too(compiled: Callable[..., Bundle]) -> None:
    artifact = compiled(backend="openvino", dtype="int8-weights").manifest.artifacts[0]
    assert artifact.accuracy is not None
    assert (artifact.accuracy.computed_dtype, artifact.accuracy.sample_texts) == (
        "int8-weights",
        "built-in sample images",
    )
    # Further from float32 than any rounding of it, and near it all the same.
    assert 1e-4 < artifact.accuracy.largest_difference < 0.05 * artifact.accuracy.largest_output


def test_int8_is_calibrated_on_sample_images(compiled: Callable[..., Bundle]) -> None:
    artifact = compiled(backend="openvino", dtype="int8").manifest.artifacts[0]
    assert artifact.calibration is not None
    assert artifact.calibration.source == "built-in sample images"
    assert artifact.accuracy is not None
    assert (artifact.accuracy.computed_dtype, artifact.accuracy.sample_texts) == ("int8", "built-in sample images")
    # The weights are random; the labels of some samples lie close together.
    assert artifact.accuracy.agreement is not None
    assert artifact.accuracy.agreement > 0.8
    assert 1e-4 < artifact.accuracy.largest_difference < 0.25 * artifact.accuracy.largest_output


def test_int8_is_calibrated_on_one_half_of_a_folder_of_images_and_compared_on_the_other(
    compiled: Callable[..., Bundle], photographs: Path
) -> None:
    artifact = compiled(backend="openvino", dtype="int8", calibration=photographs).manifest.artifacts[0]
    assert artifact.calibration is not None
    assert (artifact.calibration.texts, artifact.calibration.source) == (32, str(photographs))
    assert artifact.accuracy is not None
    assert artifact.accuracy.samples == 32
    assert artifact.accuracy.sample_texts == f"32 other images of {photographs}"


def test_an_image_that_cannot_calibrate_is_refused_by_name(compiled: Callable[..., Bundle], photographs: Path) -> None:
    damaged = photographs / "10.png"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(SetupError, match=f"^{damaged}: image: is a PNG file that is cut off or damaged"):
        compiled(backend="openvino", dtype="int8", calibration=photographs)


def test_texts_do_not_calibrate_a_model_of_images_nor_images_one_of_texts(
    compiled: Callable[..., Bundle], sources: dict[str, Path], photographs: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"text {number}" for number in range(64)))
    with pytest.raises(SetupError, match=r"texts\.txt: a model of images is calibrated on a folder of images"):
        compiled(backend="openvino", dtype="int8", calibration=texts)
    of_texts = {"source": str(sources["classifier"]), "task": "text_classification"}
    with pytest.raises(SetupError, match="photographs: a model of texts is calibrated on a file of texts"):
        compiled(backend="openvino", dtype="int8", calibration=photographs, **of_texts)


@pytest.mark.long
async def test_a_model_of_images_is_traced_for_neuron_and_answers_as_with_openvino(
    neuron_double: object, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    traced = compiled(name="traced", **for_neuron(tmp_path, "1x4", "4x4"))
    stamp = json.loads((traced.folder / "artifacts/neuronx/4x4.json").read_text())
    assert stamp["inputs"] == [{"name": "pixels", "shape": [4, 3, 32, 32], "dtype": "float32"}]
    accuracy = traced.manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert (accuracy.samples, accuracy.agreement) == (32, 1.0)
    images = itertools.islice(image_files(), 6)
    inputs = [TaskInput(image_classification=ImageClassificationInput(image=image)) for _, image in images]
    expected = await infer_all(compiled(backend="openvino").folder, inputs)
    for ours, theirs in zip(await infer_all(traced.folder, inputs, cores=1), expected, strict=True):
        scores = [
            {label.label: label.score for label in result.image_classification.labels} for result in (ours, theirs)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "neuronx", "buckets": BucketRequest(("8x3",))},
            "--bucket 8x3: an image counts as 4 tokens: write 8x4",
        ),
        ({"buckets": BucketRequest(("8x3",))}, "--bucket 8x3: an image counts as 4 tokens: write 8x4"),
    ],
)
def test_what_images_lack_is_refused(changes: dict[str, Any], message: str, compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(SetupError, match=message):
        compiled(**changes)


def test_buckets_of_whole_images_are_kept(compiled: Callable[..., Bundle]) -> None:
    artifact = compiled(buckets=BucketRequest(("1x4", "8x4"))).manifest.artifacts[0]
    assert [str(bucket) for bucket in artifact.buckets] == ["1x4", "8x4"]


def test_a_processor_that_makes_images_which_the_model_does_not_take_is_refused(
    tmp_path: Path, compiled: Callable[..., Bundle]
) -> None:
    folder = make_image_source(tmp_path / "source", "ViT", **_LABELS)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"height": 48, "width": 40}}))
    with pytest.raises(
        SetupError,
        match="its image processor makes RGB images of 48 x 40, which ViTForImageClassification does not take",
    ):
        compiled(source=str(folder))
