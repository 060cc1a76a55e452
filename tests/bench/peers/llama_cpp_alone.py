"""llama.cpp, as its program llama-server serves a Llama with float32 weights, converted from those of transformers."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.bench.peers.generating import Prompts, answer_orders
from tests.bench.peers.launching import free_port

_SLOTS, _SLOT_TOKENS = 32, 512
_POLL_S = 0.1
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    """Answers orders for the model of a folder of `tests.bench.generation_models`, by its name: a Llama."""
    source = Path(sys.argv[1]) / "sources" / sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as scratch:
        file = f"{scratch}/model.gguf"
        _convert(source, file)
        port, threads = free_port(), str(len(os.sched_getaffinity(0)))
        options = ("--host", "127.0.0.1", "--port", str(port), "--threads", threads, "--parallel", str(_SLOTS))
        sizes = ("--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--cache-type-k", "f32", "--cache-type-v", "f32")
        command = ["llama-server", "--model", file, *options, *sizes, "--no-warmup", "--offline"]
        with subprocess.Popen(command) as server, ThreadPoolExecutor(_SLOTS) as pool:
            try:
                _wait_until_healthy(server, port)

                def generate(prompts: Prompts, new_tokens: int) -> Prompts:
                    return list(pool.map(lambda prompt: _complete(port, prompt, new_tokens), prompts))

                answer_orders(generate)
            finally:
                server.terminate()


def _complete(port: int, prompt: Any, new_tokens: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": new_tokens, "ignore_eos": True, "temperature": 0.0, "cache_prompt": False}
    content = json.dumps({**body, "return_tokens": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", content, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        token_ids: list[int] = json.load(answer)["tokens"]
    return token_ids


def _wait_until_healthy(server: "subprocess.Popen[bytes]", port: int) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise RuntimeError(f"llama-server ended with {server.returncode}")


def _convert(source: Path, file: str) -> None:
    """Writes the weights with a vocabulary of numbers, for nobody reads the texts."""
    config = json.loads((source / "config.json").read_text())
    heads, width = config["num_attention_heads"], config["hidden_size"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    words = [f"t{number}" for number in range(config["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    writer.add_add_bos_token(False)
    for name, array in load_file(source / "model.safetensors").items():
        writer.add_tensor(_name(name), _rotated(array, heads) if ".q_proj" in name or ".k_proj" in name else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def _rotated(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp rotates neighbours, transformers the two halves of a head."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main()
