"""Static embeddings: models that are a table of token vectors, as sentence-transformers and model2vec save them.

Such a folder has no configuration of transformers. It becomes the folder of an encoder of ours with mean pooling, so
that all other files treat it as an encoder. Sources: sentence-transformers 6, static_embedding.py, which reads texts of
any length and all their tokens; model2vec 0.10, model.py, which leaves out unknown tokens, and reads 512 tokens unless
config.json says otherwise. (model2vec first cuts long texts by characters, here only tokens count.)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.sentence_transformers import read_modules, read_tensors
from neuronpipe.core.errors import SetupError

# Maximum number of tokens of a text, for a table that has no limit.
_MOST_TOKENS = 32_768
_MODEL2VEC_TOKENS = 512
_POOLING = "static_pooling"
_TABLES = ("embeddings", "embedding.weight")  # the names of model2vec and of sentence-transformers


class StaticEmbeddingConfig(transformers.PretrainedConfig):
    """`skipped_token_id`: the token that pooling leaves out, or None."""

    model_type = "static_embedding"

    def __init__(
        self, hidden_size: int = 1, vocab_size: int = 1, skipped_token_id: int | None = None, **values: Any
    ) -> None:
        super().__init__(**values)
        self.hidden_size, self.vocab_size, self.skipped_token_id = hidden_size, vocab_size, skipped_token_id


class StaticEmbeddingModel(transformers.PreTrainedModel):
    """An encoder whose last hidden state is the row of each token in a table."""

    config_class = StaticEmbeddingConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **ignored: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.embedding(input_ids))


def register_static_embeddings() -> None:
    """Registers the encoder with transformers' automatic classes."""
    transformers.AutoConfig.register(StaticEmbeddingConfig.model_type, StaticEmbeddingConfig, exist_ok=True)
    transformers.AutoModel.register(StaticEmbeddingConfig, StaticEmbeddingModel, exist_ok=True)


def static_folder(folder: Path) -> Path | None:
    """Finds the folder with the table of a model of static embeddings; None for other models. Raises SetupError."""
    if modules := read_modules(folder):
        kind, path = modules[0]
        return path if kind == "StaticEmbedding" else None
    is_model2vec = read_object(folder / "config.json", may_lack=True).get("model_type") == "model2vec"
    return folder if is_model2vec else None


def write_encoder(source: Path, static: Path, folder: Path) -> None:
    """Writes the encoder into `folder`, which has links to the files of `source`. `static`: its folder of the table."""
    with refusing(f"{static}: its table of token vectors cannot be read", advice="; get its files again"):
        tensors = read_tensors(static)
    table = _fold(static, tensors)
    tokenizer = read_object(static / "tokenizer.json")
    limit = (tokenizer.get("truncation") or {}).get("max_length")
    skipped = None
    if _TABLES[0] in tensors:
        limit = read_object(source / "config.json", may_lack=True).get("max_length", _MODEL2VEC_TOKENS)
        skipped = _unknown_id(tokenizer.get("model") or {})
    modules = [("Transformer", ""), ("Pooling", _POOLING)]
    modules += [(kind, str(path.relative_to(source))) for kind, path in read_modules(source, is_known=True)[1:]]
    (folder / _POOLING).mkdir()
    files: Mapping[str, object] = {
        "config.json": {
            "model_type": StaticEmbeddingConfig.model_type,
            "architectures": [StaticEmbeddingModel.__name__],
            "vocab_size": table.shape[0],
            "hidden_size": table.shape[1],
            "skipped_token_id": skipped,
            "dtype": str(table.dtype).removeprefix("torch."),
        },
        "modules.json": [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in modules],
        f"{_POOLING}/config.json": {"pooling_mode": "mean"},
        # Both libraries leave out the special tokens around a text.
        "tokenizer.json": {**tokenizer, "post_processor": None},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": limit or _MOST_TOKENS,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }
    for name in (*files, "model.safetensors", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)  # a link to a file of the source
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    safetensors.torch.save_file({"embedding.weight": table}, folder / "model.safetensors", metadata={"format": "pt"})


def _fold(folder: Path, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Makes the row of each token, [vocabulary, width]. model2vec may share rows between tokens, and weigh tokens."""
    table = next((tensors[name] for name in _TABLES if name in tensors), None)
    if table is None or table.ndim != 2:
        raise SetupError(f"{folder}: its weights have no table of token vectors ({' or '.join(_TABLES)})")
    if "mapping" in tensors:
        table = table[tensors["mapping"].long()]
    if "weights" in tensors:
        table = table.float() * tensors["weights"].float()[:, None]
    return (table if table.is_floating_point() else table.float()).contiguous()


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    """Returns the id of the unknown token in a "model" of tokenizer.json."""
    if model.get("type") == "Unigram":
        return model.get("unk_id")
    token = model.get("unk_token")
    return (model.get("vocab") or {}).get(token) if token else None
