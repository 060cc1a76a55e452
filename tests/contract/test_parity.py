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
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Normalize, Pooling

from neuronpipe.api.v1.tasks_pb2 import RerankInput, SentenceEmbeddingInput, TaskInput, Truncation
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from tests.contract.inference import infer_all
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.repository import bert_config, save

pytestmark = pytest.mark.sampled

# The sums of a model's layers run in another order in OpenVINO than in PyTorch. Logits of up to 15 differ by up to 1e-5
# (measured: the bundles' manifests), scores and the numbers of a vector, which are smaller, by less; 5e-5 leaves room
# for other CPUs.
_TOLERANCE = 5e-5

_MANUAL = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
_SHORT = [
    "ok",
    "",
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


async def test_modules_of_every_kind_and_the_kept_dimensions_equal_sentence_transformers(tmp_path: Path) -> None:
    def dense(width: int, made: int, **options: Any) -> Dense:
        weights = np.random.default_rng(made).standard_normal((made, width)).astype(np.float32)
        return Dense(width, made, init_weight=torch.from_numpy(weights), **options)

    def make(model: Transformer) -> SentenceTransformer:
        of_tokens = dense(32, 24, module_input_name="token_embeddings")
        narrow, again = dense(24, 16, use_residual=True), dense(16, 16, use_residual=True, bias=False)
        modules = [model, of_tokens, Pooling(24), narrow, Normalize(), LayerNorm(16), again]
        torch.manual_seed(5)
        narrow.residual.reset_parameters()
        return SentenceTransformer(modules=modules, truncate_dim=12)

    await _assert_same_as_sentence_transformers(tmp_path, make)


async def test_a_prompt_that_is_left_out_of_the_pooling_is_left_out_as_in_sentence_transformers(tmp_path: Path) -> None:
    modes = ("cls", "max", "mean", "weightedmean", "lasttoken")
    await _assert_same_as_sentence_transformers(
        tmp_path,
        lambda model: SentenceTransformer(
            modules=[model, Pooling(32, modes, include_prompt=False)],
            prompts={"search": "Represent the text, please: "},
            default_prompt_name="search",
        ),
    )


@pytest.mark.parametrize("architecture", ["RoBERTa", "XLM-R"])
async def test_settings_of_a_transformer_take_the_place_of_its_tokenizers_as_in_sentence_transformers(
    architecture: str, tmp_path: Path
) -> None:
    def change(folder: Path) -> None:
        (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true, "max_seq_length": 40}')
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 24}))

    base = make_source(tmp_path / "base", architecture, "sentence_embedding")
    SentenceTransformer(modules=[Transformer(str(base)), Pooling(32)]).save(str(tmp_path / "model"))
    change(tmp_path / "model")
    await _assert_same_as_encode(tmp_path / "model", tmp_path / "repository")


async def test_special_tokens_of_the_models_prompt_are_special_and_those_of_callers_are_text(tmp_path: Path) -> None:
    prompts = {"search": "[SEP] find [MASK] this: "}
    base = save(transformers.BertModel(bert_config()), tmp_path / "base")
    model = SentenceTransformer(modules=[Transformer(str(base)), Pooling(32)], prompts=prompts)
    model.save(str(tmp_path / "model"))
    bundle = compile_model(tmp_path / "model", tmp_path / "repository", "sentence_embedding")
    texts = ["a text", "two\nlines"]
    results = await infer_all(
        bundle.folder, [_embedding(text, prompt_name="search", skip_normalize=True) for text in texts]
    )
    _assert_same_vectors(results, model.encode(texts, prompt_name="search"))
    # By parts: what transformers makes of the prompt, then the text with its special tokens divided.
    own = model.tokenizer
    start = own(prompts["search"])["input_ids"][:-1]
    text = own("of [CLS] one", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = JsonTokenizer(bundle.tokenizer_json()).encode("of [CLS] one", prompt=prompts["search"]).token_ids
    assert ids.tolist() == [*start, *text, own.sep_token_id]


async def test_a_cross_encoder_of_modules_scores_as_sentence_transformers(tmp_path: Path) -> None:
    base = save(transformers.BertModel(bert_config()), tmp_path / "base")
    torch.manual_seed(6)
    hidden = Dense(32, 16, activation_function=torch.nn.GELU())
    score = Dense(16, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    CrossEncoder(modules=[Transformer(str(base)), Pooling(32, "cls"), hidden, score]).save(str(tmp_path / "model"))
    bundle = compile_model(tmp_path / "model", tmp_path / "repository")
    assert bundle.spec.tasks == ("rerank",)
    query, texts = _TEXTS[0], [text for text in _TEXTS[1:] if "[" not in text]
    input = RerankInput(query=query, texts=texts, truncation=Truncation.TRUNCATION_RIGHT)
    (result,) = await infer_all(bundle.folder, [TaskInput(rerank=input)])
    ranked = CrossEncoder(str(tmp_path / "model"), device="cpu").rank(query, texts)
    found = {text.index: text.score for text in result.rerank.texts}
    for rank in ranked:
        assert found[rank["corpus_id"]] == pytest.approx(float(rank["score"]), abs=_TOLERANCE)


async def test_settings_without_modules_are_ignored_as_in_cross_encoders(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BERT", "rerank")
    settings = {
        "model_type": "CrossEncoder",
        "prompts": {"search": "Find what says: "},
        "default_prompt_name": "search",
    }
    (source / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    bundle = compile_model(source, tmp_path / "repository", "rerank")
    query, texts = "who sells BOATS", ["The harbour sells boats. " * 4, "ok"]
    ranking = RerankInput(query=query, texts=texts, truncation=Truncation.TRUNCATION_RIGHT)
    (result,) = await infer_all(bundle.folder, [TaskInput(rerank=ranking)])
    ours = {text.index: text.score for text in result.rerank.texts}
    ranked = CrossEncoder(str(source), device="cpu").rank(query, texts)
    assert ours == pytest.approx({rank["corpus_id"]: float(rank["score"]) for rank in ranked}, abs=_TOLERANCE)


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
    bundle = compile_model(folder, repository, "sentence_embedding", name="model")
    results = await infer_all(bundle.folder, [_embedding(text, skip_normalize=True) for text in _TEXTS])
    reference = SentenceTransformer(str(folder), device="cpu", processor_kwargs={"split_special_tokens": True})
    _assert_same_vectors(results, reference.encode(_TEXTS))
