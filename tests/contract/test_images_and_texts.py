"""Models of images and texts: what the compiler finds, and batches with texts, images, both, or none of one."""

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sentence_transformers import SentenceTransformer

from neuronpipe.api.v1.tasks_pb2 import (
    ImageEmbeddingInput,
    SentenceEmbeddingInput,
    TaskInput,
    ZeroShotImageClassificationInput,
)
from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import CompileRequest, compile_bundle
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, compute
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from neuronpipe.tasks.inputs.kind import input_kind
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.images import (
    IMAGE_TEXT_FAMILIES,
    image_files,
    image_processor,
    make_image_encoder_source,
    make_image_text_source,
    make_part_source,
)
from tests.models.repository import save_weights

# Sums of float32 in another order, as in test_backends.py.
_TOLERANCE = 2e-5
_FILES = dict(image_files(every=300))

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module", params=[(family, to) for family in IMAGE_TEXT_FAMILIES for to in ("openvino", "torch")])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    family, backend = request.param
    folder = tmp_path_factory.mktemp(family)
    source = make_image_text_source(folder / "source", family)
    return compile_model(source, folder / "repository", name="model", backend=backend, max_divergence=5e-5)


def test_one_bundle_answers_for_images_and_for_texts(bundle: Bundle) -> None:
    spec = bundle.spec
    expected = ("zero_shot_image_classification", "image_embedding", "sentence_embedding", "sentence_similarity")
    assert spec.tasks == expected
    assert spec.answers("tokenization")
    assert (spec.inputs, spec.max_tokens, spec.image_tokens) == (("input_ids", "pixels", "places"), 16, 4)


async def test_a_row_is_the_same_alone_and_in_any_batch(bundle: Bundle) -> None:
    artifact, spec = bundle.manifest.artifacts[0], bundle.spec
    kind, generator = input_kind(spec), np.random.default_rng(20261123)
    assert spec.image is not None
    images: list[Arrays] = [{"pixels": generator.integers(0, 256, (3, *spec.image.size), np.uint8)} for _ in range(2)]
    texts: list[Arrays] = [
        {"input_ids": generator.integers(5, spec.vocabulary_size, tokens).astype(np.int32)} for tokens in (3, 16, 7)
    ]
    with bundle.artifact_files(artifact) as files:
        request = BackendRequest(spec, files, artifact.properties, 1, 1, versions=artifact.versions)
        backend = load_backend(artifact.backend, request)

    async def run(sequences: Sequence[Arrays]) -> Array:
        padded = backend.shapes.round_tokens(max(kind.tokens_of(sequence) for sequence in sequences))
        return (await compute(backend, 0, kind.pad(sequences, padded)))["embedding"]

    try:
        alone = {id(input): (await run([input]))[0] for input in [*images, *texts]}
        for batch in (texts, images, [images[0], *texts, images[1]], [texts[2], images[1], texts[0]]):
            for row, input in zip(await run(batch), batch, strict=True):
                expected = alone[id(input)]
                np.testing.assert_allclose(row, expected, rtol=0, atol=_TOLERANCE * np.abs(expected).max())
        assert isinstance(backend.shapes, ShapeMenu)
        for shape in backend.shapes.planned(1, 4, 1000):  # of texts, and of images
            inputs = kind.pad([kind.shortest(shape.tokens)] * shape.rows, shape.tokens)
            assert len((await compute(backend, 0, inputs, is_alone=shape.is_alone))["embedding"]) == shape.rows
    finally:
        backend.close()


async def test_a_request_that_cannot_be_computed_names_what_is_wrong(bundle: Bundle) -> None:
    image = next(iter(_FILES.values()))

    async def refusal(**fields: Any) -> str:
        given = {"image": image, "candidate_labels": ["a cat"]} | fields
        with pytest.raises(InvalidInput) as raised:
            await infer_all(
                bundle.folder, [TaskInput(zero_shot_image_classification=ZeroShotImageClassificationInput(**given))]
            )
        return str(raised.value)

    assert await refusal(image=b"") == "image: is empty"
    assert await refusal(candidate_labels=[]) == "candidate_labels: 0 texts, must be from 1 to 1024"
    assert "exactly one {}" in await refusal(hypothesis_template="no place")
    assert "candidate_labels[0]: " in await refusal(candidate_labels=["many words " * 40])


def test_what_computes_fixed_shapes_or_no_model_is_refused(tmp_path: Path) -> None:
    source = make_image_text_source(tmp_path / "source", "CLIP")
    cases: Sequence[tuple[dict[str, Any], str]] = (
        ({"backend": "fake"}, "openvino and torch take both together"),
        ({"dtype": "int8"}, "--dtype int8 is for models of texts or of images; both together take any other --dtype"),
        ({"task": "sentence_embedding"}, "takes images and texts, so it cannot have the task sentence_embedding"),
    )
    for changes, message in cases:
        request = CompileRequest(str(source), "", tmp_path / "repository", "model")
        with pytest.raises(SetupError, match=message):
            compile_bundle(dataclasses.replace(request, **changes), lambda line: None)


def test_a_model_of_images_without_a_head_makes_vectors(tmp_path: Path) -> None:
    source = make_image_encoder_source(tmp_path / "source", "DINOv2")
    found = read_configuration(source).find_task()
    assert (found.task, found.reason) == ("image_embedding", "Dinov2Model")


@pytest.mark.parametrize("is_scaled", [True, False])
async def test_vectors_of_dinov2_equal_those_of_the_pipeline(tmp_path: Path, is_scaled: bool) -> None:
    source = make_image_encoder_source(tmp_path / "source", "DINOv2")
    bundle = compile_model(source, tmp_path / "repository", name="model")
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    pipeline = transformers.pipeline("image-feature-extraction", model=str(source), image_processor=processor)
    inputs = [
        TaskInput(image_embedding=ImageEmbeddingInput(image=data, skip_normalize=not is_scaled))
        for data in _FILES.values()
    ]
    results = await infer_all(bundle.folder, inputs)
    for data, result in zip(_FILES.values(), results, strict=True):
        expected = np.array(pipeline(Image.open(io.BytesIO(data)), pool=True))[0]
        if is_scaled:
            expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(result.image_embedding.embedding, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("architecture", "output"),
    [
        ("CLIPVisionModelWithProjection", "image_embeds"),
        ("CLIPTextModelWithProjection", "text_embeds"),
        ("SiglipTextModel", "pooler_output"),
    ],
)
async def test_a_part_of_a_model_has_vectors_of_transformers(architecture: str, output: str, tmp_path: Path) -> None:
    source = make_part_source(tmp_path / "source", architecture)
    bundle = compile_model(source, tmp_path / "repository")
    model = getattr(transformers, architecture).from_pretrained(source).eval()
    if "Vision" in architecture:
        task, data = "image_embedding", next(iter(_FILES.values()))
        processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
        image = transformers.image_utils.load_image(Image.open(io.BytesIO(data)))
        inputs = [TaskInput(image_embedding=ImageEmbeddingInput(image=data, skip_normalize=True))]
        read = [processor(image, return_tensors="pt")]
    else:
        task, texts = "sentence_embedding", ("a cat", "two dogs on a mat")
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        inputs = [
            TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, skip_normalize=True)) for text in texts
        ]
        padded: dict[str, Any] = {"padding": "max_length", "max_length": 16} if "Siglip" in architecture else {}
        read = [tokenizer(text, return_tensors="pt", **padded) for text in texts]
    assert bundle.spec.task == task
    for result, tensors in zip(await infer_all(bundle.folder, inputs), read, strict=True):
        with torch.inference_mode():
            expected = model(**tensors)[output][0].numpy()
        np.testing.assert_allclose(getattr(result, task).embedding, expected, rtol=0, atol=_TOLERANCE)


_SENTENCES = ["a cat", "two dogs, one ball"]


async def test_a_clip_of_sentence_transformers_has_its_vectors_of_texts(tmp_path: Path) -> None:
    make_image_text_source(tmp_path / "source", "CLIP")
    reference = SentenceTransformer(str(tmp_path / "source"), device="cpu")
    reference.save(str(tmp_path / "saved"))
    bundle = compile_model(tmp_path / "saved", tmp_path / "repository", name="model")
    assert bundle.spec.tasks[:3] == ("zero_shot_image_classification", "image_embedding", "sentence_embedding")
    inputs = [
        TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, skip_normalize=True)) for text in _SENTENCES
    ]
    for result, vector in zip(await infer_all(bundle.folder, inputs), reference.encode(_SENTENCES), strict=True):
        np.testing.assert_allclose(result.sentence_embedding.embedding, vector, rtol=0, atol=_TOLERANCE)


def test_a_siglip_of_sentence_transformers_is_refused_because_of_its_padding(tmp_path: Path) -> None:
    make_image_text_source(tmp_path / "source", "SigLIP")
    SentenceTransformer(str(tmp_path / "source"), device="cpu").save(str(tmp_path / "saved"))
    with pytest.raises(SetupError, match=r"pads texts to the longest of a batch.*; take modules.json out to have"):
        compile_model(tmp_path / "saved", tmp_path / "repository")


def test_layers_behind_a_model_of_images_and_texts_are_refused(tmp_path: Path) -> None:
    make_image_text_source(tmp_path / "source", "CLIP")
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("CLIPModel", "Dense")]
    modules[0]["path"] = ""
    (tmp_path / "source" / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SetupError, match="has Dense behind its model of images and texts, which is not supported"):
        compile_model(tmp_path / "source", tmp_path / "repository")


def test_other_parts_that_project_are_refused_by_name(tmp_path: Path) -> None:
    described = {"model_type": "metaclip_2_text_model", "architectures": ["MetaClip2TextModelWithProjection"]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(SetupError, match="MetaClip2TextModelWithProjection projects its vectors, which is supported"):
        read_configuration(tmp_path).check_task("sentence_embedding")


_ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}


def _encoder(folder: Path, kind: str, **config: Any) -> Path:
    described = getattr(transformers, f"{kind}Config")(**config)
    save_weights(getattr(transformers, f"{kind}Model")(described), folder)
    image_processor("ViT", size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["ViTMSN", "ViTMAE"])
def test_a_model_that_pools_no_vector_is_refused_for_that(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"{kind}Model pools no vector of an image, which image-embedding needs"):
        compile_model(_encoder(tmp_path / "source", kind, **_ENCODER), tmp_path / "repository")


async def test_a_pooled_map_of_one_place_is_a_vector(tmp_path: Path) -> None:
    source = _encoder(tmp_path / "source", "ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    bundle = compile_model(source, tmp_path / "repository")
    data = next(iter(_FILES.values()))
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    image = transformers.image_utils.load_image(Image.open(io.BytesIO(data)))
    model = transformers.AutoModel.from_pretrained(source).eval()
    with torch.inference_mode():
        expected = model(**processor(image, return_tensors="pt")).pooler_output[0, :, 0, 0].numpy()
    asked = TaskInput(image_embedding=ImageEmbeddingInput(image=data, skip_normalize=True))
    (result,) = await infer_all(bundle.folder, [asked])
    np.testing.assert_allclose(result.image_embedding.embedding, expected, rtol=0, atol=_TOLERANCE)
