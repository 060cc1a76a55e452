"""A folder that cannot be compiled is refused in one line with a reason; no other error leaves the compiler.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_broken_folders.py
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers

from neuronpipe.core.errors import SetupError
from tests.models.compiling import compile_model
from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe, word_piece

pytestmark = pytest.mark.sampled

Change = Callable[[Path], object]


def _classifier(folder: Path) -> None:
    tokenizer = word_piece(max_tokens=64)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, num_labels=3, **SMALL)
    save(transformers.BertForSequenceClassification(config), folder, tokenizer)


def _embedder(folder: Path) -> None:
    tokenizer = word_piece(max_tokens=64)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SMALL)
    save(transformers.BertModel(config), folder, tokenizer)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 32, "out_features": 8}')
    dense = torch.nn.ModuleDict({"linear": torch.nn.Linear(32, 8)})
    torch.save(dense.state_dict(), folder / "2_Dense" / "pytorch_model.bin")


def _writer(folder: Path) -> None:
    tokenizer = byte_level_bpe(max_tokens=64)
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4)
    save(transformers.GPT2LMHeadModel(config), folder, tokenizer)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for make in (_classifier, _embedder, _writer):
        make(folder / make.__name__[1:])
    return {path.name: path for path in folder.iterdir()}


def _fields(name: str, **fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.is_file() else {}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**content, **fields}))

    return change


def _content(name: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return change


def _without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def _half(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def _tokenizer_model(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["model"] |= fields
        path.write_text(json.dumps(content))

    return change


def _tokenizer_part(**parts: Any) -> Change:
    return _fields("tokenizer.json", **parts)


def _with_token_beyond(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<brand>"])
    tokenizer.save_pretrained(folder)


def _without_architecture(change: Change) -> Change:
    def both(folder: Path) -> None:
        (folder / "config.json").unlink()
        change(folder)

    return both


def _template(**special: Any) -> Change:
    """What begins each text is another token than the vocabulary says."""

    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["post_processor"]["special_tokens"][special["id"]] = special
        path.write_text(json.dumps(content))

    return change


def _without_unknown(folder: Path) -> None:
    """A vocabulary of three letters, and the name of an unknown token that it lacks."""
    model = models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[], unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def _only(*files: str) -> Change:
    def change(folder: Path) -> None:
        for path in list(folder.iterdir()):
            path.unlink()
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"0")

    return change


def _beside(*files: str) -> Change:
    """Weights of another kind in place of PyTorch's."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"0")

    return change


def _weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def write(folder: Path) -> None:
        changed = change(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        save_file(changed, folder / "model.safetensors", {"format": "pt"})

    return write


def _of_type(kind: torch.dtype) -> Change:
    return _weights(lambda weights: {name: array.to(kind) for name, array in weights.items()})


def _in_shards(index: Any) -> Change:
    """The weights are the first of two shards."""

    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


class _Code:
    """Its pickle runs a command when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch was-run",)


def _pickled(name: str, content: object) -> Change:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").unlink(missing_ok=name.startswith("2_Dense"))
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content, folder / name)

    return write


def _link(name: str, target: str) -> Change:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return write


def _is_folder(name: str) -> Change:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return write


def _marked(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())


def _modules(*modules: tuple[str, str]) -> Change:
    listed = [
        {"type": kind if "." in kind else f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in modules
    ]
    return _content("modules.json", json.dumps(listed).encode())


def _dense(**tensors: torch.Tensor) -> Change:
    return lambda folder: torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")


_TRANSFORMER, _POOLING = ("Transformer", ""), ("Pooling", "1_Pooling")
_ADAPTER = _fields("adapter_config.json", peft_type="LORA", base_model_name_or_path="owner/base")
_MERGE = "made for owner/base; --merge-adapter compiles the two as one .pip install 'neuronpipe.compile-adapters.'."
_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
_WRONG: dict[str, tuple[Any, ...]] = {
    "config.json": (b"", b"[]", b"null", b"{", b"\xff\xfe{}", b'"x"', b"{}"),
    "tokenizer.json": (b"", b"[]", b"null", b"{}", b'{"model": 3}', b'{"version": "1.0"}'),
    "tokenizer_config.json": (b"[]", b"3", b"{"),
    "model.safetensors": (b"", b"x" * 9, b"\xff" * 64),
    "special_tokens_map.json": (b"[]",),
}
_CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": None},
    {"model_type": 3},
    {"model_type": ["bert"]},
    {"architectures": "BertForSequenceClassification"},
    {"architectures": [3]},
    {"auto_map": ["x"]},
    {"id2label": ["a", "b", "c"]},
    {"id2label": {"x": "a"}},
    {"label2id": [1]},
    {"quantization_config": "gptq"},
    {"quantization_config": {"quant_method": "awq"}},
    {"quantization": {"bits": 4, "group_size": 64}},
    {"hidden_size": "32"},
    {"hidden_size": 33},
    {"hidden_size": None},
    {"hidden_size": -1},
    {"num_hidden_layers": "2"},
    {"num_hidden_layers": 5},
    {"num_attention_heads": 0},
    {"vocab_size": 3},
    {"vocab_size": None},
    {"hidden_act": "no such function"},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": "many"},
    {"layer_norm_eps": "small"},
    {"dtype": "float17"},
    {"pruned_heads": {"0": [1]}},
    {"problem_type": "guessing"},
    {"moderation_categories": {"no such label": "hate"}},
    {"moderation_categories": ["hate"]},
)
_MODULES: tuple[tuple[str, Any], ...] = (
    ("modules.json", {"a": 1}),
    ("modules.json", ["Transformer"]),
    ("modules.json", [{"type": None, "path": ""}]),
    ("modules.json", [{"type": "sentence_transformers.models.Transformer", "path": "../.."}]),
    ("modules.json", [{"type": "sentence_transformers.models.WordEmbeddings", "path": ""}]),
    ("1_Pooling/config.json", []),
    ("1_Pooling/config.json", {"pooling_mode": 3}),
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "median"]}),
    ("2_Dense/config.json", {"in_features": None, "out_features": 8}),
    ("sentence_bert_config.json", {"config_args": {"is_decoder": True}}),
    ("2_Dense/config.json", {"in_features": "32", "out_features": 8}),
    ("2_Dense/config.json", {"in_features": 31, "out_features": 8}),
    ("2_Dense/config.json", {"in_features": 32, "out_features": 8, "activation_function": 3}),
    ("2_Dense/config.json", {"in_features": 32, "out_features": 8, "module_input_name": "no such"}),
    ("config_sentence_transformers.json", []),
    ("config_sentence_transformers.json", {"prompts": ["query: "]}),
    ("config_sentence_transformers.json", {"default_prompt_name": "none"}),
    ("config_sentence_transformers.json", {"truncate_dim": "8"}),
    ("sentence_bert_config.json", []),
    ("sentence_bert_config.json", {"max_seq_length": "long"}),
    ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}),
    ("sentence_bert_config.json", {"modality_config": {"text": {"method": "get_text_features"}}}),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
    ("sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": "max_length"}}}),
    ("sentence_bert_config.json", {"tokenizer_args": {"model_max_length": 3}}),
)
_GENERATION: tuple[dict[str, Any], ...] = (
    {"temperature": "hot"},
    {"eos_token_id": "end"},
    {"stop_strings": ["."]},
    {"watermarking_config": {"bias": 2.0}},
    {"num_beams": -1},
    {"bad_words_ids": 3},
    {"max_length": "long"},
)
_PLACES: tuple[tuple[str, Change, str], ...] = (
    ("classifier", _without("config.json"), "has no config.json"),
    ("classifier", _without("model.safetensors"), "it has no weights of PyTorch"),
    ("classifier", _without("tokenizer.json"), "tokenizer"),
    ("classifier", _half("model.safetensors"), "model.safetensors is damaged or cut off"),
    ("classifier", _half("tokenizer.json"), "tokenizer.json"),
    ("classifier", _half("config.json"), "config.json: cannot be read as JSON"),
    ("classifier", _only(), "has no config.json"),
    ("classifier", _only("model.gguf"), "it holds GGUF files of llama.cpp; compile the original model"),
    ("classifier", _only("model_index.json"), "it holds a pipeline of diffusers"),
    ("classifier", _only("tf_model.h5"), "it holds weights of TensorFlow"),
    ("classifier", _only("adapter_config.json"), "adapter_config.json: holds int, not an object"),
    ("classifier", _without_architecture(_ADAPTER), f"holds an adapter .LoRA., not a whole model, {_MERGE}"),
    ("classifier", _ADAPTER, f"holds an adapter .LoRA. beside its weights, {_MERGE}"),
    (
        "classifier",
        _beside("onnx/model.onnx"),
        "only the graph model.onnx, which the back end openvino takes; leave out --backend fake",
    ),
    (
        "classifier",
        _content("modules.json", b'[{"path": "", "type": "sentence_transformers.models.BoW"}]'),
        "no model: it has no config.json; modules.json begins with BoW, and supported are models that begin with",
    ),
    (
        "classifier",
        _fields("config.json", model_type="longt5", architectures=["LongT5EncoderModel"]),
        "LongT5EncoderModel is not supported: its attention depends on distances",
    ),
    (
        "classifier",
        _fields("config.json", quantization_config={"load_in_8bit": True, "_load_in_8bit": True}),
        "its weights are quantized by bitsandbytes; compile the original in its place, with --dtype int8",
    ),
    (
        "classifier",
        _fields("config.json", quantization_config={"quant_method": "gptq"}),
        "its weights are quantized by gptq;",
    ),
    (
        "classifier",
        _fields("config.json", auto_map={"AutoModel": "owner/name--modeling.JinaBertModel"}),
        "names code of its own .auto_map: JinaBertModel., which is not run, and what transformers has for its",
    ),
    (
        "classifier",
        _with_token_beyond,
        "its tokenizer has tokens beyond the model's [0-9]+ embeddings .<brand>.; train the model after resize_token",
    ),
    ("classifier", _beside("model.gguf"), "no weights of PyTorch .* only model.gguf"),
    ("classifier", _beside("flax_model.msgpack"), "only flax_model.msgpack"),
    (
        "classifier",
        _fields("quantize_config.json", bits=4),
        "it holds weights that GPTQ quantized; compile the original",
    ),
    ("classifier", _fields("quant_config.json", w_bit=4), "it holds weights that AWQ quantized; compile the original"),
    ("writer", _without_unknown, "unk_token"),
    ("writer", _tokenizer_model(merges=["no such"]), "cannot load its tokenizer"),
    ("writer", _tokenizer_model(vocab={}), "tokenizer"),
    ("writer", _tokenizer_model(type="Dictionary"), "cannot load its tokenizer"),
    ("writer", _tokenizer_part(pre_tokenizer={"type": "Nothing"}), "cannot load its tokenizer"),
    ("writer", _tokenizer_part(post_processor={"type": "Nothing"}), "cannot load its tokenizer"),
    ("writer", _tokenizer_part(decoder=3), "cannot load its tokenizer"),
    ("writer", _tokenizer_part(added_tokens=[{"id": 1}]), "cannot load its tokenizer"),
    ("embedder", _without("2_Dense/config.json"), "2_Dense/config.json: cannot be read as JSON"),
    ("embedder", _without("2_Dense/pytorch_model.bin"), "the weights of its Dense module cannot be read"),
    ("embedder", _half("2_Dense/pytorch_model.bin"), "the weights of its Dense module cannot be read"),
)

# Folders as they come of interrupted downloads, of other programs and of hands; each with a part of the reason.
_ODD: tuple[tuple[str, Change, str], ...] = (
    ("classifier", _of_type(torch.int8), "those of a quantization"),
    ("classifier", _of_type(torch.bool), "those of a quantization"),
    ("classifier", _weights(lambda weights: weights | {"x.weight_scale": torch.ones(1)}), "those of a quantization"),
    ("classifier", _weights(lambda weights: {"x": torch.zeros(1)}), "its weights lack"),
    ("classifier", _in_shards({"weight_map": {"a": "model-00002-of-00002.safetensors"}}), "model-00002-of-00002.saf"),
    ("classifier", _in_shards({"weight_map": None}), "has no weight_map"),
    ("classifier", _in_shards([]), "holds list, not an object"),
    (
        "classifier",
        _pickled("pytorch_model.bin", _Code()),
        "pytorch_model.bin holds more than numbers, and to read it might run its code; get the weights as safetensors",
    ),
    (
        "classifier",
        _pickled("pytorch_model.bin", b"no weights"),
        "pytorch_model.bin is damaged or cut off; get the file",
    ),
    ("classifier", _pickled("pytorch_model.bin", [1]), "pytorch_model.bin holds list"),
    ("embedder", _pickled("2_Dense/pytorch_model.bin", _Code()), "the weights of its Dense module cannot be read"),
    ("classifier", _link("model.safetensors", "/nowhere/model.safetensors"), "or a link to none"),
    ("classifier", _link("config.json", "config.json"), "or a link to none"),
    ("classifier", _is_folder("config.json"), "has no config.json"),
    ("classifier", _is_folder("tokenizer.json"), "tokenizer"),
    ("classifier", _content("model.safetensors", _POINTER), "/model.safetensors: a pointer of Git LFS, not the file"),
    ("classifier", _content("tokenizer.json", _POINTER), "/tokenizer.json: a pointer of Git LFS"),
    ("classifier", _content("config.json", b"<!doctype html>"), "config.json: cannot be read as JSON"),
    ("classifier", _content("config.json", b"[" * 100_000), "config.json: cannot be read as JSON"),
    ("classifier", _marked("config.json"), "config.json: cannot be read as JSON: Unexpected UTF-8 BOM"),
    (
        "classifier",
        _content("tokenizer_config.json", b'{"a": "\xe9"}'),
        "tokenizer_config.json: cannot be read as JSON",
    ),
    ("writer", _content("generation_config.json", b'{"a": "\xe9"}'), "generation_config.json"),
    ("writer", _content("generation_config.json", b"[]"), "generation_config.json"),
    ("classifier", _fields("config.json", id2label={"0": "\ud800", "1": "b", "2": "c"}), "config.json: cannot be read"),
    (
        "classifier",
        _fields("config.json", id2label={"0": None, "1": 3, "2": "c"}),
        "no name for each label .id2label has 0: None, 1: 3.; write there, and in label2id, a text for each number",
    ),
    ("classifier", _fields("config.json", id2label={"0": "a", "1": "b", "5": "c"}), "has 2: None.; write there"),
    ("classifier", _fields("config.json", id2label={"0": "a", "1": "b"}, label2id=None), "another shape than config"),
    ("classifier", _fields("config.json", vocab_size=10**30), "config.json has vocab_size"),
    ("classifier", _fields("config.json", num_hidden_layers=-1), "has num_hidden_layers -1"),
    ("classifier", _fields("config.json", num_hidden_layers=10**6), "has num_hidden_layers 1000000, .* at most 1,000"),
    ("classifier", _fields("config.json", text_config={"encoder_layers": 5000}), "has encoder_layers 5000, .* 1,000"),
    ("classifier", _fields("config.json", num_labels=10**7), "has num_labels 10000000, .* at most 1,000,000"),
    ("writer", _fields("config.json", n_layer=1001), "has n_layer 1001, .* at most 1,000"),
    ("classifier", _fields("config.json", vocab_size=20_000_000), "has vocab_size 20000000, .* at most 2,000,000"),
    ("writer", _fields("config.json", text_config={"vocab_size": 2_000_001}), "has vocab_size 2000001, .* 2,000,000"),
    ("classifier", _tokenizer_model(continuing_subword_prefix="@@"), "prefix '@@', and .* begin with ##; correct it"),
    ("classifier", _tokenizer_model(continuing_subword_prefix=""), "prefix '', and .* begin with ##; correct it"),
    ("classifier", _tokenizer_model(continuing_subword_prefix=None), "cannot load its tokenizer"),
    ("classifier", _fields("config.json", num_attention_heads=-4), "has num_attention_heads -4"),
    ("classifier", _fields("config.json", num_labels=10**11), "has num_labels 100000000000"),
    ("classifier", _fields("config.json", model_type="vit"), "its model type 'vit' has no such head"),
    ("classifier", _fields("config.json", layer_norm_eps=float("nan")), "NaN"),
    ("classifier", _fields("config.json", architectures=["RobertaForSequenceClassification"]), "Roberta"),
    (
        "classifier",
        _fields("config.json", model_type="own", auto_map={"AutoModel": "modeling.Own"}),
        "'own', which transformers .* it has code of its own",
    ),
    ("classifier", _fields("tokenizer_config.json", model_max_length=-5), "model_max_length"),
    ("classifier", _fields("tokenizer_config.json", model_max_length=2), "takes 2 tokens by model_max_length"),
    ("classifier", _fields("tokenizer_config.json", tokenizer_class=5), "sets tokenizer_class to 5"),
    ("classifier", _fields("tokenizer_config.json", model_input_names=["pixel_values"]), "sets model_input_names"),
    ("classifier", _template(id="[CLS]", ids=[7777], tokens=["[CLS]"]), "beyond the model's .* .the id 7777"),
    ("classifier", _fields("config.json", num_hidden_layers=1), r"its weights have more layers .bert.encoder.layer.1"),
    ("writer", _fields("generation_config.json", suppress_tokens="all"), "suppress_tokens.0: Input should be a valid"),
    (
        "writer",
        _weights(lambda weights: {name: array * 1e30 for name, array in weights.items()}),
        "also NaN or infinite",
    ),
    ("classifier", _fields("tokenizer_config.json", model_max_length="512"), "model_max_length"),
    ("embedder", _modules(_TRANSFORMER, _TRANSFORMER, _POOLING), "has a module Transformer"),
    ("embedder", _modules(_TRANSFORMER, _POOLING, _POOLING), "has a module Pooling"),
    ("embedder", _modules(_TRANSFORMER, ("Router", "1_Router"), _POOLING), "Router"),
    ("embedder", _modules(("Asym", ""), _POOLING), "Asym"),
    ("embedder", _modules(_TRANSFORMER), "no Pooling module"),
    ("embedder", _modules(_TRANSFORMER, ("custom_st.Pooling", "1_Pooling")), "code of its own, which is not run"),
    ("embedder", _fields("1_Pooling/config.json", pooling_mode="median"), "pooling median; supported are cls"),
    ("embedder", _modules(_TRANSFORMER, ("LSTM", "1_LSTM"), _POOLING), "LSTM"),
    ("embedder", _modules(_TRANSFORMER, ("own.Module", "1_Module")), "own.Module|Module"),
    ("embedder", _modules(_TRANSFORMER, ("Pooling", "9_Pooling")), "9_Pooling/config.json"),
    ("embedder", _modules(_TRANSFORMER, _POOLING, ("LayerNorm", "2_Dense")), "has no number dimension"),
    ("embedder", _dense(**{"linear.weight": torch.full((8, 32), float("nan")), "linear.bias": torch.ones(8)}), "NaN"),
    ("embedder", _dense(**{"linear.weight": torch.ones(8, 31), "linear.bias": torch.ones(8)}), "Dense"),
    ("embedder", _dense(**{"linear.weight": torch.ones(8, 32)}), "Dense"),
    ("embedder", _fields("2_Dense/config.json", activation_function="os.system"), "os.system"),
    (
        "embedder",
        _fields("2_Dense/config.json", activation_function="torch.nn.modules.activation.PReLU"),
        "activation torch.nn.modules.activation.PReLU",
    ),
    ("embedder", _fields("2_Dense/config.json", out_features=0), "2_Dense"),
    ("embedder", _fields("sentence_bert_config.json", max_seq_length=0), "max_seq_length"),
    ("embedder", _fields("sentence_bert_config.json", max_seq_length=32.5), "max_seq_length"),
    ("embedder", _fields("config_sentence_transformers.json", prompts={"query": 3}), "prompts"),
    ("embedder", _fields("config_sentence_transformers.json", truncate_dim=-1), "truncate_dim"),
    ("writer", _content("chat_template.jinja", b"{% for %}"), "its chat_template is none"),
    ("writer", _content("chat_template.jinja", b"\xe9"), "chat_template.jinja"),
    ("writer", _fields("tokenizer_config.json", chat_template=3), "tokenizer_config.json: sets chat_template to 3"),
    ("writer", _fields("config.json", n_head=5), "config.json|n_head|num_heads"),
    ("writer", _fields("config.json", n_positions=1), "shape"),
    ("writer", _fields("adapter_config.json", base_model_name_or_path=None), "holds an adapter"),
)


def _cases() -> Iterator[Any]:
    for name, contents in _WRONG.items():
        for content in contents:
            yield pytest.param("classifier", _content(name, content), "", id=f"{name} {content[:12]!r}")
    for fields in _CONFIGS:
        yield pytest.param("classifier", _fields("config.json", **fields), "", id=str(fields))
    for name, value in _MODULES:
        yield pytest.param("embedder", _content(name, json.dumps(value).encode()), "", id=f"{name} {value}")
    for fields in _GENERATION:
        yield pytest.param("writer", _fields("generation_config.json", **fields), "", id=str(fields))
    for number, (base, change, message) in enumerate((*_PLACES, *_ODD)):
        yield pytest.param(base, change, message, id=f"{number} {message}")


@pytest.mark.parametrize(("base", "change", "message"), [*_cases()])
def test_a_broken_folder_is_refused_in_one_line_that_says_why(
    base: str, change: Change, message: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(bases[base], tmp_path / "source")
    change(source)
    backend = "openvino" if base == "writer" else "fake"
    with pytest.raises(SetupError, match=message or None) as refused:
        compile_model(source, tmp_path / "repository", backend=backend)
    text = str(refused.value)
    assert "\n" not in text
    assert len(text) < 700
    assert "source" in text  # the folder, or a file of it
    assert not list((tmp_path / "repository").rglob("*/1"))
    assert not Path("was-run").exists()
