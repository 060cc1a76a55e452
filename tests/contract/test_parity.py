"""Text classification equals transformers' pipeline, sentence embedding equals sentence-transformers' encode."""

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
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, Pooling

from neuronpipe.api.v1.tasks_pb2 import (
    ScoreFunction,
    SentenceEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.compiler import CompileRequest, compile_bundle
from tests.contract.inference import infer_all
from tests.models import LABELS, bert_config, save

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
_PAIRS = [
    *zip(_SHORT, reversed(_SHORT), strict=True),
    # Too long in all: the first, the second, both about the same.
    (_LONG[-1], "a short one"),
    ("a short one", _LONG[-1]),
    (_LONG[-1], _LONG[-2]),
    (_LONG[-2], _LONG[-2]),
    (_LONG[4], _LONG[5]),
]
_FUNCTIONS = {
    None: ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
    "softmax": ScoreFunction.SCORE_FUNCTION_SOFTMAX,
    "sigmoid": ScoreFunction.SCORE_FUNCTION_SIGMOID,
    "none": ScoreFunction.SCORE_FUNCTION_NONE,
}


@pytest.mark.parametrize("model", ["classifier", "multi-label"])
@pytest.mark.parametrize("function", _FUNCTIONS)
async def test_scores_of_texts_equal_those_of_transformers(
    model: str, function: str | None, sources: dict[str, Path], repository: Path
) -> None:
    inputs = [_classification(text, None, function) for text in _TEXTS]
    expected = _pipeline(sources[model])(_TEXTS, function_to_apply=function, top_k=None, truncation=True)
    _assert_same_labels(await infer_all(repository / model / "1", inputs), expected)


@pytest.mark.parametrize("model", ["classifier", "multi-label"])
async def test_scores_of_pairs_equal_those_of_transformers(
    model: str, sources: dict[str, Path], repository: Path
) -> None:
    inputs = [_classification(text, pair, None) for text, pair in _PAIRS]
    pairs = [{"text": text, "text_pair": pair} for text, pair in _PAIRS]
    expected = _pipeline(sources[model])(pairs, top_k=None, truncation=True)
    _assert_same_labels(await infer_all(repository / model / "1", inputs), expected)


@pytest.mark.parametrize("top_k", [0, 1, 2, 4])
async def test_number_of_labels_equals_that_of_transformers(
    top_k: int, sources: dict[str, Path], repository: Path
) -> None:
    inputs = [_classification(text, None, None, top_k) for text in _SHORT]
    expected = _pipeline(sources["classifier"])(_SHORT, top_k=top_k or 1)
    _assert_same_labels(await infer_all(repository / "classifier" / "1", inputs), expected)


async def test_vectors_equal_those_of_sentence_transformers(sources: dict[str, Path], repository: Path) -> None:
    reference = _sentence_transformer(sources["minilm"])
    inputs = [_embedding(text) for text in _TEXTS]
    _assert_same_vectors(await infer_all(repository / "minilm" / "1", inputs), reference.encode(_TEXTS))


async def test_first_dimensions_are_scaled_as_in_sentence_transformers(
    sources: dict[str, Path], repository: Path
) -> None:
    reference = _sentence_transformer(sources["minilm"])
    for dimensions in (1, 100, 384):
        inputs = [_embedding(text, dimensions=dimensions) for text in _SHORT]
        expected = reference.encode(_SHORT, normalize_embeddings=True, truncate_dim=dimensions)
        _assert_same_vectors(await infer_all(repository / "minilm" / "1", inputs), expected)


async def test_raw_vectors_equal_those_of_sentence_transformers(sources: dict[str, Path], repository: Path) -> None:
    whole = _sentence_transformer(sources["minilm"])
    reference = SentenceTransformer(
        modules=[module for module in whole if not isinstance(module, Normalize)], device="cpu"
    )
    for dimensions in (100, 384):
        inputs = [_embedding(text, dimensions=dimensions, skip_normalize=True) for text in _SHORT]
        expected = reference.encode(_SHORT, truncate_dim=dimensions)
        _assert_same_vectors(await infer_all(repository / "minilm" / "1", inputs), expected)


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


def _pipeline(folder: Path) -> Any:
    # As here, what looks like a special token in a text is text.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    return transformers.pipeline("text-classification", model=str(folder), tokenizer=tokenizer, device="cpu")


def _sentence_transformer(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", processor_kwargs={"split_special_tokens": True})


def _classification(text: str, pair: str | None, function: str | None, top_k: int = len(LABELS)) -> TaskInput:
    return TaskInput(
        text_classification=TextClassificationInput(
            text=text,
            text_pair=pair or "",
            top_k=top_k,
            function=_FUNCTIONS[function],
            truncation=Truncation.TRUNCATION_RIGHT,
        )
    )


def _assert_same_labels(results: Sequence[Any], expected: list[list[dict[str, Any]]]) -> None:
    ours = [[(label.label, label.score) for label in result.text_classification.labels] for result in results]
    assert ours == [
        [(label["label"], pytest.approx(label["score"], abs=_TOLERANCE)) for label in labels] for labels in expected
    ]


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
