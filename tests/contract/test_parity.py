"""Sentence embedding equals sentence-transformers' encode, with each part that a model may have. tests/oracle compares
the options.
"""

import json
import pydoc_data.topics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, Truncation
from neuronpipe.compiler import CompileRequest, compile_bundle
from tests.contract.inference import infer_all
from tests.models import bert_config, save

pytestmark = pytest.mark.sampled

# The sums of a model's layers run in another order in OpenVINO than in PyTorch. Logits of up to 15 differ by up to 1e-5
# (measured: the bundles' manifests), scores and the numbers of a vector, which are smaller, by less; 5e-5 leaves room
# for other CPUs.
_TOLERANCE = 5e-5

_MANUAL = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
_SHORT = [
    "ok",
    "!",
    "   spaces \t and\nlines\u00a0 ",
    "The ferry leaves Stockholm at half past nine.",
    "The ferry leaves Stockholm at half past nine!",
    "PARIS Paris paris",
    "Zürich, Łódź, Çeşme, Århus, Reykjavík",
    "Le cafe\u0301 de la Re\u0301publique, Z\u0351\u036b\u0343a\u034clgo",
    "北京是中华人民共和国的首都。",
    "東京タワーは1958年に建てられた。",
    "서울은 대한민국의 수도이다.",
    "ירושלים היא בירת ישראל",
    "القاهرة هي عاصمة مصر",
    "दिल्ली भारत की राजधानी है।",
    "👩‍👩‍👧‍👦 went to 🏔️ 👍🏽 🇮🇸",
    "𐎠𐎡𐎢 ꙮ 𓀀",
    "[CLS] and [SEP] and [MASK], literally",
    "x" * 150,
    "3.14159 * 2e10 - 0x1F / (a[i] % 7)",
    "https://example.org/path?query=1&other=%20#fragment",
]
_LONG = [
    " ".join(_MANUAL[1000 * turn : 1000 * turn + words])
    for turn, words in enumerate((20, 50, 90, 130, 170, 200, 250, 450, 700))
]
_TEXTS = [*_SHORT, *_LONG]


@pytest.mark.parametrize("pooling", ["cls", ("mean", "cls"), ("max", "mean_sqrt_len_tokens")], ids=str)
async def test_pooling_equals_that_of_sentence_transformers(pooling: str | tuple[str, ...], tmp_path: Path) -> None:
    await _assert_same_as_sentence_transformers(
        tmp_path, lambda model: SentenceTransformer(modules=[model, Pooling(32, pooling)])
    )


@pytest.mark.parametrize("flags", [["mean_tokens", "max_tokens", "cls_token"], []], ids=str)
async def test_pooling_flags_of_old_models_are_read_as_sentence_transformers_reads_them(
    flags: list[str], tmp_path: Path
) -> None:
    kinds = ("mean_tokens", "max_tokens", "cls_token", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    old = {"word_embedding_dimension": 32} | {f"pooling_mode_{kind}": kind in flags for kind in kinds}

    def write_old_format(folder: Path) -> None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(old))

    await _assert_same_as_sentence_transformers(
        tmp_path, lambda model: SentenceTransformer(modules=[model, Pooling(32)]), change=write_old_format
    )


async def test_dense_layers_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    weights = torch.from_numpy(np.random.default_rng(11).standard_normal((12, 32)).astype(np.float32))
    narrow = Dense(32, 12, activation_function=torch.nn.Tanh(), init_weight=weights, init_bias=torch.arange(12) / 12)
    wide = Dense(12, 32, bias=False, activation_function=torch.nn.Identity(), init_weight=weights.T.contiguous())
    await _assert_same_as_sentence_transformers(
        tmp_path, lambda model: SentenceTransformer(modules=[model, Pooling(32), narrow, wide])
    )


@pytest.mark.parametrize(
    "activation", [torch.nn.GELU, torch.nn.ReLU, torch.nn.SiLU, torch.nn.Sigmoid], ids=lambda kind: kind.__name__
)
async def test_activations_of_dense_layers_equal_those_of_sentence_transformers(
    activation: type[torch.nn.Module], tmp_path: Path
) -> None:
    weights = torch.from_numpy(np.random.default_rng(12).standard_normal((16, 32)).astype(np.float32))
    dense = Dense(32, 16, activation_function=activation(), init_weight=weights)
    await _assert_same_as_sentence_transformers(
        tmp_path, lambda model: SentenceTransformer(modules=[model, Pooling(32), Dropout(0.5), dense])
    )


async def test_default_prompt_goes_before_every_text_as_in_sentence_transformers(tmp_path: Path) -> None:
    await _assert_same_as_sentence_transformers(
        tmp_path,
        lambda model: SentenceTransformer(
            modules=[model, Pooling(32)],
            prompts={"search": "Find this: ", "store": "Keep: "},
            default_prompt_name="search",
        ),
    )


async def test_length_limit_of_the_modules_equals_that_of_sentence_transformers(tmp_path: Path) -> None:
    def make(model: Transformer) -> SentenceTransformer:
        model.max_seq_length = 24
        return SentenceTransformer(modules=[model, Pooling(32)])

    await _assert_same_as_sentence_transformers(tmp_path, make)


async def test_model_without_modules_is_pooled_as_sentence_transformers_pools_it(tmp_path: Path) -> None:
    folder = save(transformers.BertModel(bert_config()), tmp_path / "plain")
    await _assert_same_as_encode(folder, tmp_path / "repository")


def _sentence_transformer(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", processor_kwargs={"split_special_tokens": True})


def _embedding(text: str, **options: Any) -> TaskInput:
    return TaskInput(
        sentence_embedding=SentenceEmbeddingInput(text=text, truncation=Truncation.TRUNCATION_RIGHT, **options)
    )


def _assert_same_vectors(results: Sequence[Any], expected: Any) -> None:
    ours = np.array([result.sentence_embedding.embedding for result in results], np.float32)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=_TOLERANCE)


async def _assert_same_as_sentence_transformers(
    folder: Path,
    make: Callable[[Transformer], SentenceTransformer],
    change: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Saves the model that `make` builds around a small BERT, changes its files,
    and compares the vectors of all texts."""
    base = save(transformers.BertModel(bert_config()), folder / "base")
    make(Transformer(str(base))).save(str(folder / "model"))
    change(folder / "model")
    await _assert_same_as_encode(folder / "model", folder / "repository")


async def _assert_same_as_encode(folder: Path, repository: Path) -> None:
    request = CompileRequest(source=str(folder), task="sentence_embedding", repository=repository, name="model")
    bundle = compile_bundle(request, lambda line: None)
    results = await infer_all(bundle.folder, [_embedding(text, skip_normalize=True) for text in _TEXTS])
    _assert_same_vectors(results, _sentence_transformer(folder).encode(_TEXTS))
