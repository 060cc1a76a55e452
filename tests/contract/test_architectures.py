"""Every architecture, in a small configuration, keeps the contract of a back end on every back end; docs/models.md says
so, too. Compiling takes long, so a sample is tested; `make oracle` tests all.

What cannot run here is skipped with the reason: pytest's summary lists them.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import NO_BUCKETS, BucketRequest, NeuronxOptions, PipelineOptions
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import BACKENDS, load_backend
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, compute
from neuronpipe.stages.neuron_executor.executor_model import cut
from neuronpipe.stages.neuron_executor.runtimes.neuron import device_count
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.inputs.kind import input_kind
from tests.conftest import DOUBLES
from tests.documentation.measured_models import GRAPHS, PAGE, RECORD, page, wanted
from tests.models.architectures import ARCHITECTURES, ENCODER_DECODERS, MAX_TOKENS, TEXT_ARCHITECTURES, make_source
from tests.models.compiling import compile_model
from tests.models.images import IMAGE_TEXT_FAMILIES
from tests.suite.sampling import Sample, sample_of

_SEED = 20261121
# The fake back end computes no model, so none is different from another.
_PLACES = [
    *(name for name in BACKENDS if name != "fake"),
    *("openvino in parts", "neuronx in parts", "torch on a GPU", "neuronx on a device"),
]
# Those that no core can share, with the reason.
_UNCUT = dict.fromkeys(("ALBERT", "Longformer"), "has no two layers of its own that run one after the other")
_UNCUT |= dict.fromkeys(("DeBERTa-v3", "Swin"), "passes from one layer to the next")
_UNCUT |= dict.fromkeys(ENCODER_DECODERS, "has an encoder that every layer of its decoder reads")
# Those of images and texts have a suite of their own, test_images_and_texts.py, and so has GLiNER, test_gliner.py.
_OF_ONE_KIND = [name for name in ARCHITECTURES if name not in (*IMAGE_TEXT_FAMILIES, "GLiNER")]
_CORES = 2
# An image of 32 x 32 pixels counts as 4 tokens.
_BUCKETS = {"text_classification": ("4x16", "4x64"), "image_classification": ("4x4",)}
_DEVICES = device_count()  # before the double has this process see none
# Sums of float32 in another order, as in test_backends.py; ModernBERT has twice as many layers as that counts.
_TOLERANCE = 2e-5
# Their parts are those of openvino; of each kind of model one is traced.
_TRACED_IN_PARTS = ("BERT", "ModernBERT", "Qwen3", "ViT")


def _reason_to_skip(place: str, architecture: str) -> str | None:
    if place.endswith("in parts") and architecture in _UNCUT:
        return "it is refused, as a test of its own shows"
    if place == "torch on a GPU" and not torch.cuda.is_available():
        return "no CUDA device"
    if place == "neuronx on a device" and not _DEVICES:
        return "no Neuron device; `neuronpipe accept` runs on one"
    if place == "neuronx on a device" and str(DOUBLES) in sys.path:
        return f"this process has the contract double; run it alone: pytest {__file__} -k device"
    return None


def _drawn(place: str, sample: Sample) -> list[str]:
    """The sample of a place. PyTorch and the double of Neuron take six and twelve seconds for a model, so theirs is a
    sample of that of the others.
    """
    if place == "neuronx in parts":
        return sample.some(_TRACED_IN_PARTS)
    drawn = sample.some(_OF_ONE_KIND)
    return sample.some(drawn) if place in ("torch", "neuronx") else drawn


def _compile(folder: Path, architecture: str, backend: str, parts: int = 1) -> Bundle:
    task = "text_classification" if architecture in TEXT_ARCHITECTURES else "image_classification"
    return compile_model(
        make_source(folder / "source", architecture, task),
        folder,
        task,
        name="model",
        backend=backend,
        max_divergence=5e-5,
        buckets=BucketRequest(_BUCKETS[task]) if backend == "neuronx" else NO_BUCKETS,
        pipeline=PipelineOptions(parts),
        neuronx=NeuronxOptions(cache=folder / "cache"),
    )


@dataclass(frozen=True)
class _Loaded:
    backend: Backend
    spec: ModelSpec

    def sequence(self, tokens: int, number: int = 0) -> Arrays:
        generator = np.random.default_rng([_SEED, tokens, number])
        if self.spec.image:
            return {"pixels": generator.integers(0, 256, (3, *self.spec.image.size), np.uint8)}
        # Any id but that of padding, from which RoBERTa counts positions.
        return {"input_ids": generator.integers(5, self.spec.vocabulary_size, tokens).astype(np.int32)}

    async def run(self, *sequences: Arrays, room: int = 0, core: int = 0) -> list[Array]:
        lengths = [self.spec.tokens_of(sequence) for sequence in sequences]
        inputs = input_kind(self.spec).pad(sequences, self.backend.shapes.round_tokens(max(*lengths, room)))
        outputs = await compute(self.backend, core, inputs)
        return [cut(outputs, row, tokens, self.spec.outputs)["logits"] for row, tokens in enumerate(lengths)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "loaded" in metafunc.fixturenames:
        drawn = {place: _drawn(place, sample_of(metafunc.config)) for place in _PLACES}
        pairs = [(place, name) for name in _OF_ONE_KIND for place in _PLACES if name in drawn[place]]
        metafunc.parametrize("loaded", pairs, indirect=True, scope="module", ids="-".join)


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Loaded]:
    place, architecture = request.param
    if reason := _reason_to_skip(place, architecture):
        pytest.skip(f"{architecture} on {place}: {reason}")
    name = place.split(" ")[0]
    if place in ("neuronx", "neuronx in parts"):
        request.getfixturevalue("neuron_double")
    folder = tmp_path_factory.mktemp(architecture)
    bundle = _compile(folder, architecture, name, parts=_CORES if place.endswith("in parts") else 1)
    artifact = bundle.artifact(name)
    cores = min(_CORES, torch.cuda.device_count()) if place == "torch on a GPU" else _CORES
    with bundle.artifact_files(artifact) as files, pytest.MonkeyPatch.context() as patch:
        given = (bundle.spec, files, artifact.properties, cores, _CORES)
        compiled: Any = {"buckets": artifact.buckets, "versions": artifact.versions}
        load = BackendRequest(*given, pipeline_cores=artifact.pipeline_cores, **compiled)
        if place == "torch":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        backend = load_backend(name, load)
    yield _Loaded(backend, bundle.spec)
    backend.close()


@pytest.mark.parametrize("architecture", _UNCUT)
def test_what_cannot_be_cut_into_parts_is_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"--pipeline-cores: .*{_UNCUT[architecture]}"):
        _compile(tmp_path, architecture, "openvino", parts=2)


def _assert_equal(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=_TOLERANCE * float(np.abs(expected).max()))


async def test_a_row_is_the_same_alone_padded_and_in_any_place_of_a_batch(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (3, 16, 7, 40)]
    alone = [(await loaded.run(sequence))[0] for sequence in sequences]
    for outputs, expected in zip(await loaded.run(*sequences), alone, strict=True):
        _assert_equal(outputs, expected)
    for outputs, expected in zip(await loaded.run(*reversed(sequences)), reversed(alone), strict=True):
        _assert_equal(outputs, expected)
    _assert_equal((await loaded.run(sequences[0], room=60))[0], alone[0])


async def test_different_rows_have_different_outputs_of_the_right_shape(loaded: _Loaded) -> None:
    first, second = await loaded.run(loaded.sequence(8, 1), loaded.sequence(8, 2))
    assert first.shape == second.shape == (len(loaded.spec.labels),)
    assert np.abs(first - second).max() > 10 * _TOLERANCE


async def test_the_longest_sequence_is_computed_and_the_limit_is_that_of_the_architecture(loaded: _Loaded) -> None:
    assert loaded.spec.max_tokens == (loaded.spec.image.tokens if loaded.spec.image else MAX_TOKENS)
    (outputs,) = await loaded.run(loaded.sequence(MAX_TOKENS))
    assert np.isfinite(outputs).all()


async def test_an_error_leaves_the_back_end_as_it_was(loaded: _Loaded) -> None:
    (expected,) = await loaded.run(loaded.sequence(9))
    broken: Arrays = {name: np.ones((2, 9 if name == "attention_mask" else 8), np.int64) for name in loaded.spec.inputs}
    if loaded.spec.image:
        broken = {"pixels": np.ones((2, 3, 30, 32), np.uint8)}
    with pytest.raises(BackendError):
        await compute(loaded.backend, 0, broken)
    _assert_equal((await loaded.run(loaded.sequence(9)))[0], expected)


async def test_cores_that_run_at_once_do_not_disturb_each_other(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(12, core) for core in range(loaded.backend.cores)]
    alone = [(await loaded.run(sequence))[0] for sequence in sequences]
    at_once = await asyncio.gather(*(loaded.run(sequence, core=core) for core, sequence in enumerate(sequences)))
    for (outputs,), expected in zip(at_once, alone, strict=True):
        _assert_equal(outputs, expected)


def test_sparse_blocks_limit_the_tokens_to_where_transformers_computes_full_attention(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BigBird", "text_classification")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"block_size": 4, "num_random_blocks": 1}))
    bundle = compile_model(source, tmp_path / "repository", "text_classification", backend="fake")
    assert bundle.spec.max_tokens == (5 + 2 * 1) * 4


def test_the_page_is_made_of_what_was_measured() -> None:
    assert PAGE.read_text() == page(json.loads(RECORD.read_text()))


def test_every_architecture_task_and_back_end_is_measured() -> None:
    record = json.loads(RECORD.read_text())
    assert [(row["architecture"], row["task"], row["backend"]) for row in record["rows"]] == wanted()
    assert sorted(task for served in GRAPHS.values() for task in served) == sorted(
        task for task in SOURCE_TASKS if not TASKS[task].generates
    )


def test_what_the_page_says_to_work_is_as_near_to_pytorch_as_the_tests_demand() -> None:
    rows = json.loads(RECORD.read_text())["rows"]
    assert not [row for row in rows if "reason" in row]
    # As the compilations of these tests, most of whose outputs are logits of up to 50.
    assert max(row["difference"] for row in rows) < 1e-4
