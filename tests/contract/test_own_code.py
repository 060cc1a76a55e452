"""Models that are published with code of their own answer as that code, which is not run."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import NO_BUCKETS, BucketRequest
from neuronpipe.core.errors import SetupError
from neuronpipe.core.tensors import Array
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, compute
from neuronpipe.tasks.inputs.kind import input_kind
from tests.models import jina_bert, jina_xlm_roberta, nomic_experts
from tests.models.architectures import TEXT_ARCHITECTURES, make_source
from tests.models.compiling import compile_model
from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

pytestmark = pytest.mark.sampled

_TEXTS = ["the quick brown fox", "a", "numbers and characters of a class, " * 4]
# Sums of float32 in another order; the vectors' numbers are up to 3.
_TOLERANCE = 6e-6


def _compile(source: Path, folder: Path, backend: str = "torch", task: str = "") -> Bundle:
    buckets = BucketRequest(("4x16", "4x64")) if backend == "neuronx" else NO_BUCKETS
    return compile_model(source, folder / "repository", task, backend=backend, buckets=buckets)


async def _run(bundle: Bundle, backend: str, texts: Sequence[Sequence[int]], mask_at: int | None = None) -> Array:
    """What the bundle answers to a batch of texts, its first output. `mask_at`: for the head that fills a mask."""
    artifact = bundle.artifact(backend)
    with bundle.artifact_files(artifact) as files:
        request = BackendRequest(
            bundle.spec, files, artifact.properties, 1, 1, buckets=artifact.buckets, versions=artifact.versions
        )
        loaded = load_backend(backend, request)
    try:
        sequences = [{"input_ids": np.asarray(text, np.int32)} for text in texts]
        if mask_at is not None:
            sequences[0]["mask_position"] = np.eye(1, len(texts[0]), mask_at, np.int32)[0]
        tokens = loaded.shapes.round_tokens(max(map(len, texts)))
        return (await compute(loaded, 0, input_kind(bundle.spec).pad(sequences, tokens)))[bundle.spec.outputs[0].name]
    finally:
        loaded.close()


def _tokens(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text, truncation=True)["input_ids"] for text in _TEXTS]


@pytest.mark.parametrize(
    ("heads", "backend"),
    [(4, "openvino"), (6, "torch"), (8, "torch"), pytest.param(8, "neuronx", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("has_query_norms", [False, True])
async def test_jina_bert_answers_as_its_published_code(
    has_query_norms: bool, heads: int, backend: str, tmp_path: Path, neuron_double: Any
) -> None:
    tokenizer = byte_level_bpe(max_tokens=64) if has_query_norms else word_piece(max_tokens=64)
    source = jina_bert.make_source(
        tmp_path / "source", "sentence_embedding", tokenizer, has_query_norms=has_query_norms, heads=heads
    )
    bundle = _compile(source, tmp_path, backend, "sentence_embedding")
    texts = _tokens(tokenizer)
    expected = torch.stack([jina_bert.token_vectors(source, text).mean(0) for text in texts])
    np.testing.assert_allclose(await _run(bundle, backend, texts), expected.numpy(), rtol=0, atol=_TOLERANCE)


async def test_a_reranker_of_jina_scores_pairs_as_its_published_code(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Jina v2", "rerank")
    bundle = _compile(source, tmp_path, task="rerank")
    weights = load_file(source / "model.safetensors")
    text = _tokens(TEXT_ARCHITECTURES["Jina v2"].tokenizer(max_tokens=64))[2]
    first = jina_bert.token_vectors(source, text)[0]
    pooled = torch.tanh(weights["bert.pooler.dense.weight"] @ first + weights["bert.pooler.dense.bias"])
    expected = weights["classifier.weight"] @ pooled + weights["classifier.bias"]
    np.testing.assert_allclose((await _run(bundle, "torch", [text]))[0], expected.numpy(), rtol=0, atol=_TOLERANCE)


async def test_jina_bert_fills_masks_as_its_published_code(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Jina v2, code", "fill_mask")
    bundle = _compile(source, tmp_path)
    assert (bundle.spec.task, bundle.spec.architecture) == ("fill_mask", "JinaBertForMaskedLM")
    weights = load_file(source / "model.safetensors")
    tokenizer = TEXT_ARCHITECTURES["Jina v2, code"].tokenizer(max_tokens=64)
    text = tokenizer(f"one {tokenizer.mask_token} word")["input_ids"]
    place = text.index(tokenizer.mask_token_id)
    vector = jina_bert.token_vectors(source, text)[place]
    head = {name.removeprefix("cls.predictions."): value for name, value in weights.items() if name.startswith("cls")}
    hidden = torch.nn.functional.gelu(head["transform.dense.weight"] @ vector + head["transform.dense.bias"])
    norm = head["transform.LayerNorm.weight"], head["transform.LayerNorm.bias"]
    hidden = torch.nn.functional.layer_norm(hidden, (32,), *norm, 1e-12)
    # The head has the weights of the embeddings (tie_word_embeddings).
    expected = weights["bert.embeddings.word_embeddings.weight"] @ hidden + head["bias"]
    found = await _run(bundle, "torch", [text], mask_at=place)
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=0, atol=2e-5)


def test_a_bert_of_jina_without_gates_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Jina v2", "sentence_embedding")
    _change(source, feed_forward_type="original")
    with pytest.raises(SetupError, match=r"config.json has feed_forward_type 'original'; of Jina's BERT"):
        _compile(source, tmp_path)


def _change(source: Path, **values: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


_NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": "configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "modeling_hf_nomic_bert.NomicBertModel",
    },
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 48,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 64,
    "n_layer": 2,
    "n_positions": 64,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
}


def _nomic(folder: Path) -> tuple[Path, Any, Any]:
    """As nomic-embed-text-v1.5 and snowflake-arctic-embed-m-long are published, with the model and the tokenizer."""
    tokenizer = word_piece(max_tokens=64)
    config = transformers.NomicBertConfig(
        vocab_size=len(tokenizer), **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}
    )
    model = transformers.NomicBertModel(config).eval()
    save(model, folder, tokenizer)
    names = load_file(folder / "model.safetensors")
    assert {"emb_ln.weight", "encoder.layers.1.attn.Wqkv.weight", "encoder.layers.0.mlp.fc12.weight"} <= set(names)
    (folder / "config.json").write_text(json.dumps(_NOMIC | {"vocab_size": len(tokenizer)}))
    return folder, model, tokenizer


def _mean(model: Any, tokenizer: Any, text: Sequence[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        mean: np.ndarray[Any, Any] = model(torch.tensor([text])).last_hidden_state[0].mean(0).numpy()
    return mean


@pytest.mark.parametrize("backend", ["openvino", "torch"])
async def test_nomic_in_the_names_of_its_own_code_is_read(backend: str, tmp_path: Path) -> None:
    source, model, tokenizer = _nomic(tmp_path / "source")
    bundle = _compile(source, tmp_path, backend, "sentence_embedding")
    assert bundle.spec.max_tokens == 64
    texts = _tokens(tokenizer)
    expected = np.stack([_mean(model, tokenizer, text) for text in texts])
    np.testing.assert_allclose(await _run(bundle, backend, texts), expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("backend", ["openvino", "torch", "neuronx"])
async def test_nomic_with_experts_answers_as_its_published_code(
    backend: str, tmp_path: Path, neuron_double: Any
) -> None:
    tokenizer = unigram(max_tokens=64)
    source = nomic_experts.make_source(tmp_path / "source", "sentence_embedding", tokenizer)
    bundle = _compile(source, tmp_path, backend, "sentence_embedding")
    assert bundle.spec.architecture == "NomicExpertsModel"
    texts = _tokens(tokenizer)
    expected = torch.stack([nomic_experts.token_vectors(source, text).mean(0) for text in texts])
    np.testing.assert_allclose(await _run(bundle, backend, texts), expected.numpy(), rtol=0, atol=_TOLERANCE)


def test_experts_in_int8_stay_close(tmp_path: Path) -> None:
    source = nomic_experts.make_source(tmp_path / "source", "sentence_embedding", unigram(max_tokens=64))
    bundle = compile_model(source, tmp_path / "repository", "sentence_embedding", dtype="int8", min_agreement=0.9)
    assert [artifact.float_parts for artifact in bundle.manifest.artifacts] == [()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_shared_experts", 1),
        ("moe_normalize_expert_weights", True),
        ("qkv_proj_bias", False),
        ("architectures", ["NomicBertForSequenceClassification"]),
    ],
)
def test_nomic_with_other_experts_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    source = nomic_experts.make_source(tmp_path / "source", "sentence_embedding", unigram(max_tokens=64))
    _change(source, **{name: value})
    message = f"config.json has {name} {value!r}, which only the model's own code computes"
    with pytest.raises(SetupError, match=re.escape(message)):
        _compile(source, tmp_path, "fake", "sentence_embedding")


def test_nomic_that_is_scaled_beyond_its_trained_positions_takes_no_more_tokens_than_these(tmp_path: Path) -> None:
    source, _, _ = _nomic(tmp_path / "source")
    _change(source, rotary_scaling_factor=2)
    assert _compile(source, tmp_path, "fake", "sentence_embedding").spec.max_tokens == 48


@pytest.mark.parametrize(
    ("name", "value"), [("causal", True), ("prenorm", True), ("rotary_emb_fraction", 0.5), ("qkv_proj_bias", True)]
)
def test_nomic_with_what_only_its_own_code_computes_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    source, _, _ = _nomic(tmp_path / "source")
    _change(source, **{name: value})
    with pytest.raises(SetupError, match=f"config.json has {name} {value!r}, which only the model's own code computes"):
        _compile(source, tmp_path, "fake", "sentence_embedding")


_FLASH = "jinaai/xlm-roberta-flash-implementation--"


@pytest.mark.parametrize(
    ("published", "advice"),
    [
        pytest.param(
            {
                "model_type": "xlm-roberta",
                "architectures": ["XLMRobertaModel"],
                "auto_map": {
                    "AutoConfig": f"{_FLASH}configuration_xlm_roberta.XLMRobertaFlashConfig",
                    "AutoModel": f"{_FLASH}modeling_lora.XLMRobertaLoRA",
                },
                "position_embedding_type": "rotary",
                "lora_adaptations": ["retrieval.query", "retrieval.passage"],
            },
            "compile jinaai/jina-embeddings-v3-hf, the same model",
            id="jina-embeddings-v3",
        ),
        pytest.param(
            {
                "model_type": "nvembed",
                "architectures": ["NVEmbedModel"],
                "auto_map": {
                    "AutoConfig": "configuration_nvembed.NVEmbedConfig",
                    "AutoModel": "modeling_nvembed.NVEmbedModel",
                },
            },
            "no port to transformers is published; compile Qwen/Qwen3-Embedding-8B",
            id="NV-Embed-v2",
        ),
    ],
)
@pytest.mark.parametrize("task", ["", "sentence_embedding"])
def test_a_model_that_only_its_own_code_computes_is_refused_with_the_model_to_compile(
    published: dict[str, Any], advice: str, task: str, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", "XLM-R", "sentence_embedding")
    _change(source, **published)
    with pytest.raises(SetupError, match=f"code of its own \\(auto_map\\), which is not run; {advice}"):
        _compile(source, tmp_path, "fake", task)


@pytest.mark.parametrize("backend", ["openvino", "torch"])
async def test_jina_reranker_2_scores_as_xlm_r_in_other_names(backend: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "XLM-R", "rerank")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    texts = _tokens(TEXT_ARCHITECTURES["XLM-R"].tokenizer(max_tokens=64))
    expected = torch.cat([model(torch.tensor([text])).logits for text in texts]).detach()
    jina_xlm_roberta.publish(source, "XLMRobertaForSequenceClassification", emb_pooler=None)
    bundle = _compile(source, tmp_path, backend, "rerank")
    assert bundle.spec.architecture == "XLMRobertaForSequenceClassification"
    np.testing.assert_allclose(await _run(bundle, backend, texts), expected.numpy(), rtol=0, atol=2e-5)


async def test_jina_s_xlm_r_with_rotary_positions_has_the_vectors_of_transformers(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Jina v3", "sentence_embedding")
    _change(source, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    model = transformers.AutoModel.from_pretrained(source).eval()
    texts = _tokens(TEXT_ARCHITECTURES["Jina v3"].tokenizer(max_tokens=64))
    expected = torch.cat([model(torch.tensor([text])).last_hidden_state.mean(1) for text in texts]).detach()
    jina_xlm_roberta.publish(source, "XLMRobertaModel")
    bundle = _compile(source, tmp_path, "torch", "sentence_embedding")
    assert bundle.spec.architecture == "JinaEmbeddingsV3Model"
    np.testing.assert_allclose(await _run(bundle, "torch", texts), expected.numpy(), rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_act", "gelu_new"), ("position_embedding_type", "alibi"), ("truncate_dim", 64), ("emb_pooler", "mean")],
)
def test_jina_s_xlm_r_with_what_only_its_own_code_computes_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "XLM-R", "rerank")
    jina_xlm_roberta.publish(source, "XLMRobertaForSequenceClassification", **{name: value})
    with pytest.raises(SetupError, match=f"config.json has {name} {value!r}, which only the model's own code computes"):
        _compile(source, tmp_path, "fake")


async def test_a_llama_of_nvidia_sees_all_tokens(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Llama", "sentence_embedding")
    model = transformers.AutoModel.from_pretrained(source).eval()
    texts = _tokens(TEXT_ARCHITECTURES["Llama"].tokenizer(max_tokens=64))
    expected = [
        model(torch.tensor([text]), attention_mask=torch.zeros(1, 1, len(text), len(text))).last_hidden_state.mean(1)
        for text in texts
    ]
    code = {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}
    published = {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "auto_map": code}
    _change(source, **published, pooling="avg", temperature=0.02)
    bundle = _compile(source, tmp_path, "torch", "sentence_embedding")
    found = await _run(bundle, "torch", texts)
    np.testing.assert_allclose(found, torch.cat(expected).detach().numpy(), rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "value"),
    [("architectures", ["LlamaBidirectionalForSequenceClassification"]), ("pooling", "weighted_avg")],
)
def test_another_llama_of_nvidia_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Llama", "sentence_embedding")
    _change(source, **{"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], name: value})
    with pytest.raises(SetupError, match=rf"config.json has {name} {re.escape(repr(value))}, which only the model's"):
        _compile(source, tmp_path, "fake", "sentence_embedding")


def _gte(folder: Path, kind: str, head: str, tokens: Any, theta: float, **values: Any) -> tuple[Path, Any, Any]:
    """As gte-multilingual-base (kind New) and snowflake-arctic-embed-m-v2.0 (kind Gte) are published."""
    tokenizer = tokens(max_tokens=64)
    rope = {"rope_type": "default", "rope_theta": theta}
    sizes: dict[str, Any] = {**SMALL, "max_position_embeddings": 8192, "vocab_size": len(tokenizer)}
    config = transformers.GteConfig(**sizes, type_vocab_size=values["type_vocab_size"], rope_parameters=rope)
    model = getattr(transformers, f"Gte{head}")(config).eval()
    save(model, folder, tokenizer)
    saved = json.loads((folder / "config.json").read_text())
    written = {name: value for name, value in saved.items() if name not in ("rope_parameters", "architectures")}
    code = "Alibaba-NLP/new-impl--"
    own = {
        "model_type": kind.lower(),
        "architectures": [f"{kind}{head}"],
        "auto_map": {"AutoConfig": f"{code}configuration.{kind}Config", "AutoModel": f"{code}modeling.{kind}Model"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_theta": theta,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    (folder / "config.json").write_text(json.dumps(written | own | values))
    return folder, model, tokenizer


@pytest.mark.parametrize(
    ("kind", "tokens", "values"),
    [
        ("New", unigram, {"type_vocab_size": 1, "rope_scaling": {"factor": 8.0, "type": "ntk"}}),
        ("New", word_piece, {"type_vocab_size": 0, "rope_scaling": None}),
        ("Gte", unigram, {"type_vocab_size": 1, "rope_scaling": None}),
    ],
    ids=["gte-multilingual", "gte-en", "arctic-embed-m-v2.0"],
)
async def test_gte_in_the_names_of_its_own_code_is_read(
    kind: str, tokens: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    source, model, tokenizer = _gte(tmp_path / "source", kind, "Model", tokens, 20_000.0, **values)
    if values["rope_scaling"]:
        # As NTKScalingRotaryEmbedding of its modeling.py: 8 is the factor, and 8 wide is each head.
        base = torch.tensor(20_000.0 * 8)
        model.rotary_emb.inv_freq = 1 / (base ** (torch.arange(0, 8, 2) / 8)) / 8 ** (2 / 8)
    bundle = _compile(source, tmp_path, task="sentence_embedding")
    texts = _tokens(tokenizer)
    expected = np.stack([_mean(model, tokenizer, text) for text in texts])
    np.testing.assert_allclose(await _run(bundle, "torch", texts), expected, rtol=0, atol=_TOLERANCE)


async def test_a_reranker_of_gte_is_read_by_its_heads_name(tmp_path: Path) -> None:
    source, model, tokenizer = _gte(
        tmp_path / "source", "New", "ForSequenceClassification", unigram, 20_000.0, type_vocab_size=1, rope_scaling=None
    )
    bundle = _compile(source, tmp_path)
    assert bundle.spec.architecture == "GteForSequenceClassification"
    text = _tokens(tokenizer)[2]
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0].numpy()
    np.testing.assert_allclose((await _run(bundle, "torch", [text]))[0], expected, rtol=0, atol=2e-5)


def _embedder_of_qwen(folder: Path, code: str) -> Path:
    """As gte-Qwen2 and stella_en_1.5B_v5 are published, but for their pooling: with the mean of the tokens' vectors."""
    source = make_source(folder, "Qwen2", "sentence_embedding")
    _change(source, architectures=["Qwen2ForCausalLM"], auto_map={"AutoModel": code})
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    (source / "modules.json").write_text(json.dumps(listed))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return source


@pytest.mark.parametrize(
    ("values", "sees_all"), [({}, True), ({"is_causal": False}, True), ({"is_causal": True}, False)], ids=str
)
async def test_an_embedder_of_qwen_sees_the_tokens_that_its_own_code_sees(
    values: dict[str, bool], sees_all: bool, tmp_path: Path
) -> None:
    source = _embedder_of_qwen(tmp_path / "source", "modeling_qwen.Qwen2Model")
    _change(source, **values)
    model = transformers.Qwen2Model.from_pretrained(source).eval()
    texts = _tokens(transformers.AutoTokenizer.from_pretrained(source))

    def vector(text: Sequence[int]) -> Array:
        hidden = torch.zeros(len(text), len(text)) if sees_all else torch.full((len(text),) * 2, -1e9).triu(1)
        with torch.inference_mode():
            states = model(torch.tensor([text]), attention_mask=hidden[None, None]).last_hidden_state
        mean: Array = states[0].mean(0).numpy()
        return mean

    found = await _run(_compile(source, tmp_path), "torch", texts)
    np.testing.assert_allclose(found, np.stack([vector(text) for text in texts]), rtol=0, atol=_TOLERANCE)


def test_an_embedder_whose_own_code_may_see_other_tokens_is_refused(tmp_path: Path) -> None:
    source = _embedder_of_qwen(tmp_path / "source", "owner/name--modeling.Qwen2Model")
    with pytest.raises(SetupError, match="does not say whether a token sees those behind it; write is_causal there"):
        _compile(source, tmp_path, "fake")
    _change(source, is_causal=True)
    assert _compile(source, tmp_path, "fake").spec.task == "sentence_embedding"


def test_the_last_token_that_a_tokenizers_own_code_adds_is_added(tmp_path: Path) -> None:
    source = _embedder_of_qwen(tmp_path / "source", "modeling_qwen.Qwen2Model")
    content = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(content | {"post_processor": None}))
    path = source / "tokenizer_config.json"
    names = ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]
    own = {"add_eos_token": True, "tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": names}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    served = tokenizers.Tokenizer.from_file(str(_compile(source, tmp_path, "fake").folder / "tokenizer.json"))
    eos = json.loads(path.read_text())["eos_token"]
    assert served.encode("the quick fox").tokens[-1] == eos


def test_a_tokenizer_that_is_code_of_its_own_is_refused_and_nobody_is_asked_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(tmp_path / "source", "Jina v2", "sentence_embedding")
    path = source / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization.OwnTokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", ask)
    with pytest.raises(SetupError, match=r"it has code of its own \(auto_map in tokenizer_config.json\)") as refused:
        _compile(source, tmp_path, "fake")
    assert "\n" not in str(refused.value)
    assert asked == []


def test_gte_with_what_only_its_own_code_computes_is_refused(tmp_path: Path) -> None:
    source, _, _ = _gte(tmp_path / "source", "New", "Model", unigram, 20_000.0, type_vocab_size=1)
    _change(source, rope_scaling={"type": "ntk", "factor": 2.0, "mixed_b": 0.625})
    with pytest.raises(SetupError, match=r"config.json has rope_scaling.mixed_b 0.625, which only the model"):
        _compile(source, tmp_path, "fake", "sentence_embedding")
