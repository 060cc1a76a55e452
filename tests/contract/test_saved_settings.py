"""Every field that the libraries can write into a model's files has a rule: one of a newer version fails here.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_saved_settings.py
"""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models
from transformers import processing_utils, tokenization_utils_base
from transformers.configuration_utils import PretrainedConfig

from neuronpipe.compiler import saved_settings
from neuronpipe.core.errors import SetupError
from tests.models import repository as test_models
from tests.models.compiling import compile_model

_IS_4 = transformers.__version__.startswith("4.")
# Kinds of models whose tokenizers are read.
_TOKENIZERS = (
    "albert barthez bart bert bertweet big_bird bloom camembert code_llama codegen cohere deberta deberta_v2 "
    "distilbert electra gemma gpt2 gpt_neox herbert llama longformer m2m_100 marian mbart mbart50 mobilebert mpnet "
    "nllb pegasus phobert qwen2 rembert roberta roformer squeezebert t5 xglm xlm_roberta"
)
# Parameters of methods that are no fields, and what a call takes.
_OF_CALLS = re.compile(
    r"^(self|args|kwargs|tokenizer_object|gguf_file|proxies|subfolder|resume_download|use_auth_token|token|revision|"
    r"commit_message|repo_id|cache_dir|force_download|save_jinja_files|text_pair|max_target_length|slow_tokenizer|_.*)$"
)


def _named_in(source: str, receiver: str = r"\w*kwargs") -> set[str]:
    """The keys that a source takes out of a dictionary."""
    taken = re.findall(rf'\b{receiver}\.(?:pop|get|setdefault)\(\s*"(\w+)"', source)
    return {*taken, *re.findall(rf'\b{receiver}\["(\w+)"\]', source)}


def _unruled(names: Iterable[str], rules: saved_settings.Rules) -> list[str]:
    return sorted(name for name in {*names} - {*rules} if not _OF_CALLS.match(name))


def test_fields_that_all_configurations_share_have_a_rule() -> None:
    known = {**saved_settings.CONFIG, **saved_settings.GENERATION_CONFIG}
    # Of classes, not of files.
    of_classes = re.compile(
        "_plan$|^(sub_configs|base_config_key|is_composition|has_no_defaults_at_init|extra_|attribute_map)"
    )
    made = getattr(PretrainedConfig, "__post_init__", PretrainedConfig.__init__)
    named = {*saved_settings._fields(PretrainedConfig)} | _named_in(inspect.getsource(made))
    assert not [name for name in _unruled(named, known) if not of_classes.search(name)]


def test_fields_of_a_generation_config_have_a_rule() -> None:
    named = {*transformers.GenerationConfig().to_dict()} | _named_in(
        inspect.getsource(transformers.GenerationConfig.__init__)
    )
    assert not _unruled(named - {"generation_kwargs"}, saved_settings.GENERATION_CONFIG)


def test_fields_of_tokenizers_have_a_rule() -> None:
    base = tokenization_utils_base.PreTrainedTokenizerBase
    named = _named_in(inspect.getsource(base.__init__)) | {*base.SPECIAL_TOKENS_ATTRIBUTES}
    named |= _named_in(inspect.getsource(base._from_pretrained), "init_kwargs")
    named |= _named_in(inspect.getsource(transformers.PreTrainedTokenizerFast.__init__))
    folder = Path(transformers.__file__).parent / "models"
    for kind in _TOKENIZERS.split():
        for path in (folder / kind).glob("tokenization_*.py"):
            for parameters in re.findall(r"def __init__\(\s*self,(.*?)\)(?: -> None)?:\n", path.read_text(), re.DOTALL):
                named |= {*re.findall(r"^\s*(\w+)\s*(?::|=|,)", parameters, re.MULTILINE)}
    assert not _unruled(named, saved_settings.TOKENIZER_CONFIG)
    special = {*base.SPECIAL_TOKENS_ATTRIBUTES}
    assert not _unruled(special, saved_settings.SPECIAL_TOKENS_MAP)


def test_fields_of_tokenizer_json_have_a_rule() -> None:
    whole = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    assert not _unruled(whole, saved_settings.TOKENIZER)
    for model in (models.BPE(), models.WordPiece(), models.WordLevel(), models.Unigram([("a", 0.0)])):
        written = json.loads(tokenizers.Tokenizer(model).to_str())["model"]
        assert not _unruled(written, saved_settings.TOKENIZER_MODEL)


def test_options_of_image_processors_have_a_rule() -> None:
    assert not _unruled(processing_utils.ImagesKwargs.__annotations__, saved_settings.IMAGE_PROCESSOR)


def test_fields_of_lora_adapters_have_a_rule() -> None:
    peft = pytest.importorskip("peft", reason="peft is not part of the Neuron SDK's environment")
    assert not _unruled((field.name for field in dataclasses.fields(peft.LoraConfig)), saved_settings.ADAPTER)


@pytest.mark.skipif(_IS_4, reason="sentence-transformers is not part of the Neuron SDK's environment")
def test_fields_of_sentence_transformers_have_a_rule() -> None:
    base = importlib.import_module("sentence_transformers.base.modules")
    kinds: list[tuple[Any, saved_settings.Rules]] = [(base.Transformer, saved_settings.TRANSFORMER)]
    modules = ("base", "sentence_transformer", "sparse_encoder", "cross_encoder", "multi_vector_encoder")
    found = {
        name: value
        for package in modules
        for name, value in vars(importlib.import_module(f"sentence_transformers.{package}.modules")).items()
    }
    kinds += [(found[kind], rules) for kind, rules in saved_settings.MODULE.items()]
    for kind, rules in kinds:
        parameters = {*inspect.signature(kind.__init__).parameters} - {"args", "kwargs", "model_name_or_path"}
        named = {*kind.config_keys, *getattr(kind, "config_key_renames", ()), *parameters}
        assert not _unruled(named - {"init_weight", "init_bias"}, rules), kind
    settings = _unruled(_read_of_models(), saved_settings.SENTENCE_TRANSFORMERS)
    assert not settings


def _read_of_models() -> Iterator[str]:
    """The names in config_sentence_transformers.json that some model reads, or writes."""
    for name in ("base", "sentence_transformer", "sparse_encoder", "cross_encoder", "multi_vector_encoder"):
        source = inspect.getsource(importlib.import_module(f"sentence_transformers.{name}.model"))
        yield from _named_in(source, "model_config")
        written = re.search(r"def _get_model_config.*?\n    def ", source, re.DOTALL)
        yield from re.findall(r'(?:^ {12}|config\[)"(\w+)"', written[0] if written else "", re.MULTILINE)


def _written(folder: Path, name: str, **fields: Any) -> None:
    path = folder / name
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def _compiled(source: Path, folder: Path) -> list[str]:
    lines: list[str] = []
    compile_model(source, folder, report=lines.append, backend="fake")
    return "\n".join(lines).splitlines()


def test_what_is_not_known_is_told_what_is_not_supported_refused_and_null_is_nothing(tmp_path: Path) -> None:
    source = test_models.classifier(tmp_path / "source")
    _written(source, "config.json", label2id=None, pruned_heads=None, score_scale=2.0, trained_by="us")
    _written(source, "tokenizer_config.json", truncation_side="left", brand_token="[UNK]", dropout_side=None)
    lines = _compiled(source, tmp_path)
    assert "      not applied   score_scale of config.json: compare results if the model needs it" in lines
    assert any("truncation_side of tokenizer_config.json" in line for line in lines)
    _written(
        source, "tokenizer.json", model=json.loads((source / "tokenizer.json").read_text())["model"] | {"dropout": 0.1}
    )
    with pytest.raises(
        SetupError, match=r"tokenizer.json: sets dropout to 0.1, which is not supported; remove the field"
    ):
        _compiled(source, tmp_path)


def test_fields_that_a_configuration_adds_itself_are_known(tmp_path: Path) -> None:
    """DeBERTa's pooler_hidden_size is no parameter of its class, which writes it into each config.json."""
    config = test_models.bert_config().to_dict()
    own = transformers.DebertaV2Config(**{name: config[name] for name in ("hidden_size", "num_hidden_layers")})
    own.save_pretrained(tmp_path)
    assert "pooler_hidden_size" in json.loads((tmp_path / "config.json").read_text())
    assert not saved_settings.check_settings(tmp_path, own, "text_classification")


# Of config.json as published: fields that say what the code computes anyway, or that its code reads undeclared.
_OF_GOOGLES_BERT = {
    "directionality": "bidi",
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "albert": {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0},
    "bart": {"extra_pos_embeddings": 2, "normalize_embedding": True, "static_position_embeddings": False},
    "bert": {"position_embedding_type": "absolute", "output_past": True, **_OF_GOOGLES_BERT},
    "deberta-v2": {"norm_rel_ebd": "layer_norm", "position_buckets": 256, "share_att_key": True},
    "distilbert": {"output_past": True, "sinusoidal_pos_embds": False, "tie_weights_": True},
    "electra": {"position_embedding_type": "absolute", "summary_type": "first"},
    "gpt2": {"n_ctx": 1024},
    "longformer": {"attention_mode": "longformer", "ignore_attention_mask": False},
    "marian": {"static_position_embeddings": True, "normalize_embedding": False},
    "modernbert": {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "layer_norm_eps": 1e-5,
        "local_rope_theta": 10000.0,
        "position_embedding_type": "sans_pos",
        "reference_compile": True,
    },
    "qwen2": {"max_window_layers": 24, "rope_theta": 1000000.0, "use_mrope": False, "use_sliding_window": False},
    "roberta": {"position_embedding_type": "absolute", "language": "english"},
    "t5": {"n_positions": 512, "output_past": True},
    "vit": {"encoder_stride": 16, "qkv_bias": True},
    "xlm-roberta": {"position_embedding_type": "absolute", "output_past": True},
}


def _lines_about(folder: Path, kind: str, **fields: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    config = transformers.AutoConfig.from_pretrained(folder)
    return saved_settings.check_settings(folder, config, "text_classification")


@pytest.mark.parametrize("kind", _PUBLISHED)
def test_a_published_field_that_changes_nothing_is_not_told(kind: str, tmp_path: Path) -> None:
    assert _lines_about(tmp_path, kind, **_PUBLISHED[kind]) == []


@pytest.mark.skipif(_IS_4, reason="transformers 4 computes other position embeddings of BERT")
def test_another_position_embedding_than_the_one_that_is_computed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="sets position_embedding_type to 'relative_key', which is not supported"):
        _lines_about(tmp_path, "bert", position_embedding_type="relative_key")


def test_another_value_than_the_one_that_the_code_of_a_kind_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="sets normalize_embedding to False, which is not supported"):
        _lines_about(tmp_path, "bart", normalize_embedding=False)
    (line,) = _lines_about(tmp_path, "gpt2", normalize_embedding=True)  # is no field of that kind
    assert "normalize_embedding of config.json" in line


@pytest.mark.parametrize("ends", [{"add_eos_token": True}, {"add_bos_token": True, "add_eos_token": True}], ids=str)
def test_texts_begin_and_end_as_the_settings_of_their_tokenizer_say(ends: dict[str, Any], tmp_path: Path) -> None:
    from neuronpipe.compiler.tokenizers import load_tokenizer
    from neuronpipe.stages.tokenizer.text import JsonTokenizer
    from tests.models.tokenizers import byte_level_bpe

    trained = byte_level_bpe(max_tokens=64)
    trained.backend_tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trained.save_pretrained(tmp_path)
    _written(tmp_path, "tokenizer_config.json", **ends)
    first = [trained.bos_token_id] if "add_bos_token" in ends else []
    text_ids, pair_ids = (trained(text, add_special_tokens=False)["input_ids"] for text in ("one text", "another"))
    served = JsonTokenizer(load_tokenizer(tmp_path).json.encode())
    single = [*first, *text_ids, trained.eos_token_id]
    assert served.encode("one text").token_ids.tolist() == single
    pair = served.encode("one text", "another")
    assert pair.token_ids.tolist() == [*single, *first, *pair_ids, trained.eos_token_id]
    assert pair.token_type_ids.tolist() == [0] * len(single) + [1] * (len(pair.token_ids) - len(single))
    assert served.tokens("one text", special_tokens=True).char_start.tolist()[-1] == -1
    # What is continued has no end.
    plain = load_tokenizer(tmp_path, of_prompts=True)
    assert JsonTokenizer(plain.json.encode()).encode("one text").token_ids.tolist() == text_ids
