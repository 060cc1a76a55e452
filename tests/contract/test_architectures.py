"""The architectures of the published figures, in small configurations, keep the contract of a back end on every back end.

What cannot run here is skipped with the reason: pytest's summary lists them.
"""

import asyncio
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.bundles.compiler.buckets import NO_BUCKETS, BucketRequest
from neuronpipe.bundles.compiler.neuronx import NeuronxOptions
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.neuron import device_count
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.backends import BACKENDS, load_backend
from neuronpipe.neuron_executor.backends.base import Backend, BackendError, LoadRequest
from neuronpipe.neuron_executor.batching import cut, pad
from tests.conftest import DOUBLES
from tests.models import save

_SEED = 20261121
_SIZES = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
# Positions begin after the padding id 1.
_ROBERTA = {**_SIZES, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
_BERT = {**_SIZES, "max_position_embeddings": 64}
_DISTIL = {"vocab_size": 400, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}

# architecture → (its model, the id of its padding)
_ARCHITECTURES: dict[str, tuple[Callable[[], Any], int]] = {
    "bert": (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_BERT)), 0),
    "roberta": (lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**_ROBERTA)), 1),
    "distilbert": (lambda: transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**_DISTIL)), 0),
    "albert": (lambda: transformers.AlbertForSequenceClassification(transformers.AlbertConfig(embedding_size=16, **_BERT)), 0),
    "electra": (lambda: transformers.ElectraForSequenceClassification(transformers.ElectraConfig(embedding_size=16, **_BERT)), 0),
    "xlm-roberta": (lambda: transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**_ROBERTA)), 1),
    "mpnet": (lambda: transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**_ROBERTA)), 1),
    "vit": (lambda: None, 0),
}
_PLACES = [*BACKENDS, "torch on a GPU", "neuronx on a device"]
_CORES = 2
_DEVICES = device_count()  # before the double has this process see none
# Sums of float32 in another order, as in test_backends.py.
_TOLERANCE = 1e-5


def _reason_to_skip(place: str, architecture: str) -> str | None:
    if architecture == "vit":
        return "there is no task for images: a bundle's inputs are token ids, this encoder's are pixels"
    if place == "fake":
        return "the fake back end computes no model, so none is different from another"
    if place == "torch on a GPU" and not torch.cuda.is_available():
        return "no CUDA device"
    if place == "neuronx on a device" and not _DEVICES:
        return "no Neuron device; `neuronpipe accept` runs on one"
    if place == "neuronx on a device" and str(DOUBLES) in sys.path:
        return f"this process has the contract double; run it alone: pytest {__file__} -k device"
    return None


@dataclass(frozen=True)
class _Loaded:
    backend: Backend
    spec: ModelSpec

    def sequence(self, tokens: int, number: int = 0) -> Arrays:
        generator = np.random.default_rng([_SEED, tokens, number])
        # Any id but that of padding, from which RoBERTa counts positions.
        return {"input_ids": generator.integers(5, self.spec.vocabulary_size, tokens).astype(np.int32)}

    async def run(self, *sequences: Arrays, room: int = 0, core: int = 0) -> list[Array]:
        lengths = [len(one["input_ids"]) for one in sequences]
        inputs = pad(sequences, self.backend.round_tokens(max(*lengths, room)), self.spec)
        outputs = await self.backend.run(core, inputs)
        return [cut(outputs, row, tokens, self.spec)["logits"] for row, tokens in enumerate(lengths)]


def _tokenizer(pad_token_id: int) -> Any:
    words = sorted(set(" ".join(pydoc_data.topics.topics.values()).split()))
    special = ["<pad>", "<s>", "</s>", "<unk>"] if pad_token_id == 0 else ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: index for index, word in enumerate([*special, *(word for word in words if word.isalpha())][:400])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **names)


@pytest.fixture(
    scope="module",
    params=[(place, architecture) for architecture in _ARCHITECTURES for place in _PLACES],
    ids=lambda param: "-".join(param),
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Loaded]:
    place, architecture = request.param
    if reason := _reason_to_skip(place, architecture):
        pytest.skip(f"{architecture} on {place}: {reason}")
    name = place.split(" ")[0]
    if place == "neuronx":
        request.getfixturevalue("neuron_double")
    make, pad_token_id = _ARCHITECTURES[architecture]
    folder = tmp_path_factory.mktemp(architecture)
    compile_request = CompileRequest(
        source=str(save(make(), folder / "source", _tokenizer(pad_token_id))),
        task="text_classification",
        repository=folder,
        name="model",
        backend=name,
        max_divergence=5e-5,
        buckets=BucketRequest(("4x16", "4x64")) if name == "neuronx" else NO_BUCKETS,
        neuronx=NeuronxOptions(cache=folder / "cache"),
    )
    bundle = compile_bundle(compile_request, lambda line: None)
    artifact = bundle.artifact(name)
    files = bundle.artifact_files(artifact)
    cores = min(_CORES, torch.cuda.device_count()) if place == "torch on a GPU" else _CORES
    load = LoadRequest(bundle.spec, files, artifact.properties, cores, _CORES, buckets=artifact.buckets, versions=artifact.versions)
    with pytest.MonkeyPatch.context() as patch:
        if place == "torch":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        backend = load_backend(name, load)
    yield _Loaded(backend, bundle.spec)
    backend.close()


def _assert_equal(one: Array, other: Array) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=_TOLERANCE * float(np.abs(other).max()))


async def test_a_row_is_the_same_alone_padded_and_in_any_place_of_a_batch(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (3, 16, 7, 40)]
    alone = [(await loaded.run(one))[0] for one in sequences]
    for outputs, expected in zip(await loaded.run(*sequences), alone, strict=True):
        _assert_equal(outputs, expected)
    for outputs, expected in zip(await loaded.run(*reversed(sequences)), reversed(alone), strict=True):
        _assert_equal(outputs, expected)
    _assert_equal((await loaded.run(sequences[0], room=60))[0], alone[0])


async def test_different_rows_have_different_outputs_of_the_right_shape(loaded: _Loaded) -> None:
    one, other = await loaded.run(loaded.sequence(8, 1), loaded.sequence(8, 2))
    assert one.shape == other.shape == (len(loaded.spec.labels),)
    assert np.abs(one - other).max() > 10 * _TOLERANCE


async def test_the_longest_sequence_is_computed_and_the_limit_is_that_of_the_architecture(loaded: _Loaded) -> None:
    assert loaded.spec.max_tokens == 64
    (outputs,) = await loaded.run(loaded.sequence(64))
    assert np.isfinite(outputs).all()


async def test_an_error_leaves_the_back_end_as_it_was(loaded: _Loaded) -> None:
    (expected,) = await loaded.run(loaded.sequence(9))
    broken = {name: np.ones((2, 9 if name == "attention_mask" else 8), np.int64) for name in loaded.spec.inputs}
    with pytest.raises(BackendError):
        await loaded.backend.run(0, broken)
    _assert_equal((await loaded.run(loaded.sequence(9)))[0], expected)


async def test_cores_that_run_at_once_do_not_disturb_each_other(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(12, core) for core in range(loaded.backend.cores)]
    alone = [(await loaded.run(one))[0] for one in sequences]
    at_once = await asyncio.gather(*(loaded.run(one, core=core) for core, one in enumerate(sequences)))
    for (outputs,), expected in zip(at_once, alone, strict=True):
        _assert_equal(outputs, expected)
