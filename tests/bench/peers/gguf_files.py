"""Files of llama.cpp, made from a folder of transformers: the tensors and settings that its own converter writes
for BERT, LLaMA and Qwen 2, with the package `gguf`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

_TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    # Blocks of 32 weights with a scale each; activations are quantized as they come.
    "int8": GGMLQuantizationType.Q8_0,
}
_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
}
# What llama.cpp has no place for in a model that embeds.
_LEFT_OUT = ("embeddings.position_ids", "pooler.")
_MEAN_POOLING = gguf.PoolingType.MEAN


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """Writes the model of a folder with weights of a dtype: matrices, while vectors stay float32."""
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    architecture, layers = _ARCHITECTURES[kind], config["num_hidden_layers"]
    writer = GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[architecture])
    _write_settings(writer, config)
    if kind == "bert":
        writer.add_causal_attention(False)
        writer.add_pooling_type(_MEAN_POOLING)
        writer.add_token_type_count(config["type_vocab_size"])
        _write_word_pieces(writer, source)
    else:
        _write_bytes(writer, source, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, tensor in _tensors(source / "model.safetensors"):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise ValueError(f"{name}: llama.cpp has no tensor for it")
        if kind == "llama":
            tensor = _interleaved(tensor, name, config)
        # The converter keeps what is added to tokens as it is.
        is_small = tensor.ndim == 1 or name.startswith(("embeddings.position", "embeddings.token_type"))
        of_type = GGMLQuantizationType.F32 if is_small else _TYPES[dtype]
        writer.add_tensor(new_name, gguf.quants.quantize(tensor, of_type), raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    if "rms_norm_eps" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or config
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    else:
        writer.add_layer_norm_eps(config["layer_norm_eps"])


def _write_word_pieces(writer: GGUFWriter, source: Path) -> None:
    described = json.loads((source / "tokenizer.json").read_text())
    ids = {entry["content"]: entry["id"] for entry in described["added_tokens"]}
    vocabulary = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([_phantom(token) if token not in ids else token for token in vocabulary])
    writer.add_token_types([TokenType.CONTROL if token in ids else TokenType.NORMAL for token in vocabulary])
    special = {
        writer.add_unk_token_id: "[UNK]",
        writer.add_sep_token_id: "[SEP]",
        writer.add_pad_token_id: "[PAD]",
        writer.add_bos_token_id: "[CLS]",
        writer.add_mask_token_id: "[MASK]",
    }
    for add, token in special.items():
        add(ids[token])


def _phantom(token: str) -> str:
    """llama.cpp marks the start of a word, and word pieces the rest of it."""
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def _write_bytes(writer: GGUFWriter, source: Path, size: int) -> None:
    described = json.loads((source / "tokenizer.json").read_text())
    special = {entry["content"] for entry in described["added_tokens"]}
    vocabulary = sorted(described["model"]["vocab"], key=described["model"]["vocab"].get)
    vocabulary += [f"<unused {number}>" for number in range(len(vocabulary), size)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in described["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


def _interleaved(tensor: "np.ndarray[Any, Any]", name: str, config: Mapping[str, Any]) -> "np.ndarray[Any, Any]":
    """The rows of LLaMA's queries and keys, in the order in which llama.cpp rotates them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = next((count for part, count in heads.items() if f".{part}." in name), 0)
    if not count:
        return tensor
    split = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(tensor.shape))


def _tensors(file: Path) -> "Iterator[tuple[str, np.ndarray[Any, Any]]]":
    """The tensors of a file of safetensors that llama.cpp has, one after another; all are float32."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        begin = stream.tell()
        header.pop("__metadata__", None)
        for name, described in header.items():
            if name.startswith(_LEFT_OUT):
                continue
            if described["dtype"] != "F32":
                raise ValueError(f"{file}: {name} is {described['dtype']}, not F32")
            first, last = described["data_offsets"]
            stream.seek(begin + first)
            yield name, np.frombuffer(stream.read(last - first), "<f4").reshape(described["shape"])
