"""The compile step on models of images: what it finds by itself, what it stores, and what it refuses."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.bundles.compiler.buckets import BucketRequest
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from tests.images import make_image_source

_LABELS = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_source(tmp_path_factory.mktemp("vit") / "source", "ViT", **_LABELS)


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
    assert (spec.task, spec.labels, spec.inputs, spec.max_tokens) == (
        "image_classification",
        ("cat", "dog"),
        ("pixels",),
        4,
    )
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"backend": "openvino", "dtype": "int8"},
            "--dtype int8, which is calibrated on texts, is for models of texts",
        ),
        (
            {"backend": "neuronx", "buckets": BucketRequest(("8x4",))},
            "--backend neuronx is for models of texts; openvino, torch and fake take images",
        ),
        ({"buckets": BucketRequest(("8x3",))}, "--bucket 8x3: an image counts as 4 tokens: write 8x4"),
        (
            {"task": "text_classification"},
            "ViTForImageClassification takes images, so it cannot have the task text_classification",
        ),
    ],
)
def test_what_images_do_not_have_is_refused(
    changes: dict[str, Any], message: str, compiled: Callable[..., Bundle]
) -> None:
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


def test_a_model_without_an_image_processor_is_refused(tmp_path: Path, compiled: Callable[..., Bundle]) -> None:
    folder = make_image_source(tmp_path / "source", "ViT", **_LABELS)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SetupError, match="cannot load its image processor"):
        compiled(source=str(folder))
