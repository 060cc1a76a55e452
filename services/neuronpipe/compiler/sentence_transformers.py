"""Reads the modules of a sentence-transformers model: its transformer, pooling, and later layers.

Source of the formats: sentence-transformers 2 to 6, modules.json and the config.json of each module.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from neuronpipe.core.errors import SetupError

_SETTINGS = "config_sentence_transformers.json"
_PACKAGES = ("sentence_transformers", "pylate")
_POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# Before version 6 each pooling mode had a flag, and the vectors were concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": torch.nn.Tanh,
    "torch.nn.modules.activation.GELU": torch.nn.GELU,
    "torch.nn.modules.activation.ReLU": torch.nn.ReLU,
    "torch.nn.modules.activation.SiLU": torch.nn.SiLU,
    "torch.nn.modules.activation.Sigmoid": torch.nn.Sigmoid,
    "torch.nn.modules.linear.Identity": torch.nn.Identity,
}


class Pooling(torch.nn.Module):
    """Token vectors [batch, tokens, width] and attention_mask [batch, tokens] to [batch, width x number of modes]."""

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        self.modes = tuple(modes)

    def forward(self, token_vectors: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).to(token_vectors.dtype)
        tokens = mask.sum(1).clamp(min=1e-9)
        pooled = {
            "cls": lambda: token_vectors[:, 0],
            "max": lambda: token_vectors.masked_fill(mask == 0, -1e9).max(1).values,
            "mean": lambda: (token_vectors * mask).sum(1) / tokens,
            "mean_sqrt_len_tokens": lambda: (token_vectors * mask).sum(1) / tokens.sqrt(),
            "weightedmean": lambda: _weighted_mean(token_vectors, mask),
            "lasttoken": lambda: last_token(token_vectors, attention_mask),
        }
        return torch.cat([pooled[mode]() for mode in self.modes], dim=1)


def last_token(vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The vector of the last token at which a mask is 1, or else of the first token.

    `vectors` [batch, tokens, width] and `mask` [batch, tokens] to [batch, width]. It is chosen by a select and a sum,
    which every compiler of static shapes supports, not by an index. A product would not work: ModernBERT can compute
    NaN for padding.
    """
    numbers = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    is_last = numbers == (numbers * mask).max(dim=1, keepdim=True).values.clamp(min=1)
    return torch.where(is_last.unsqueeze(-1), vectors, torch.zeros_like(vectors)).sum(dim=1)


def _weighted_mean(token_vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mean in which the nth token counts n times."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype).view(1, -1, 1)
    return (token_vectors * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class Head(torch.nn.Module):
    """Pooling, and the layers after it."""

    def __init__(self, pooling: Pooling, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = torch.nn.Sequential(*layers)

    def describe(self) -> str:
        """A description for a user."""
        layers = f", then {len(self.layers)} dense layers" if len(self.layers) else ""
        return " and ".join(self.pooling.modes) + layers

    def forward(self, token_vectors: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.layers(self.pooling(token_vectors, attention_mask))
        return vectors


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """The content of modules.json. `max_tokens` is None if it sets no limit; `prompt` is put before every text.

    `prompts`: those that a request may name in its place.
    """

    model_folder: Path
    head: Head
    max_tokens: int | None = None
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)


def read_sentence_transformer(folder: Path) -> SentenceTransformer:
    """Reads the modules. A plain Transformers model gets mean pooling.

    Raises SetupError for a module that is not supported.
    """
    if not (folder / "modules.json").is_file():
        return SentenceTransformer(folder, Head(Pooling(["mean"]), []))
    model_folder, limits, pooling, layers, is_normalized = folder, {}, None, [], False
    for kind, path in read_modules(folder, is_known=True):
        if kind == "Transformer":
            model_folder, limits = path, read_limits(path)
        elif kind == "Pooling":
            pooling = Pooling(_pooling_modes(read_json(path / "config.json"), folder))
        elif kind == "Dense" and not is_normalized:
            layers.append(read_dense(path))
        elif kind == "Dropout":  # of training only
            continue
        elif kind == "Normalize":  # done in post-processing, unless the caller says otherwise
            is_normalized = True
        elif kind == "Dense":
            raise SetupError(f"{folder}: modules.json has a Dense module behind Normalize, which is not supported")
        else:
            raise SetupError(
                f"{folder}: modules.json has a module {kind}, supported are Transformer, Pooling, Dense and Normalize"
            )
    if "message" in limits.get("modality_config", ()):
        raise SetupError(
            f"{folder}: writes texts into a chat template (modality_config has message), which is not supported for "
            "embeddings"
        )
    if pooling is None:
        raise SetupError(f"{folder}: modules.json has no Pooling module, so there is no one vector for a text")
    if limits.get("do_lower_case"):
        raise SetupError(f"{folder}: lower-cases text outside of its tokenizer (do_lower_case), which is not supported")
    return SentenceTransformer(
        model_folder, Head(pooling, layers), limits.get("max_seq_length"), default_prompt(folder), read_prompts(folder)
    )


def read_modules(folder: Path, *, is_known: bool = False) -> list[tuple[str, Path]]:
    """The name of the class and the folder of each module, in order; none of a plain model.

    `is_known`: raises SetupError also for a module of the model's own, which may compute anything.
    """
    path = folder / "modules.json"
    modules = read_json(path) if path.is_file() else ()
    for one in modules:
        if is_known and one["type"].partition(".")[0] not in _PACKAGES:
            raise SetupError(f"{folder}: modules.json has a module {one['type']}, code of its own, which is not run")
    return [(one["type"].rpartition(".")[2], folder / one["path"]) for one in modules]


def transformer_folder(folder: Path) -> Path:
    """The folder of the model's own config.json.

    In old models of sentence-transformers it is the folder of their first module.
    """
    return next((path for _, path in read_modules(folder)[:1] if (path / "config.json").is_file()), folder)


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises SetupError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path}: cannot be read as JSON") from error


def read_limits(folder: Path) -> dict[str, Any]:
    """The limits of inputs in a Transformer module, such as max_seq_length; empty if it has none.

    Raises SetupError.
    """
    # sentence_bert_config.json; in old models with the architecture's name, as sentence_roberta_config.json.
    path = next(folder.glob("sentence_*_config.json"), None)
    return dict(read_json(path)) if path else {}


def _pooling_modes(config: dict[str, Any], folder: Path) -> list[str]:
    if "pooling_mode" in config:
        modes = [config["pooling_mode"]] if isinstance(config["pooling_mode"], str) else list(config["pooling_mode"])
    else:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    unsupported = sorted(set(modes) - set(_POOLINGS))
    if unsupported:
        raise SetupError(f"{folder}: pooling {', '.join(unsupported)}; supported are {', '.join(_POOLINGS)}")
    if not config.get("include_prompt", True):
        raise SetupError(
            f"{folder}: leaves its prompt out of the pooling (include_prompt false), which is not supported"
        )
    return modes


def read_dense(folder: Path, of: str = "sentence_embedding") -> torch.nn.Module:
    """A Dense module of sentence embeddings, or of token_embeddings. Raises SetupError."""
    config = read_json(folder / "config.json")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise SetupError(f"{folder}: activation {activation}; supported are {', '.join(_ACTIVATIONS)}")
    names = {config.get(key) or of for key in ("module_input_name", "module_output_name")}
    if config.get("use_residual") or names != {of}:
        raise SetupError(f"{folder}: a Dense module with a residual connection, or of other vectors than {of}")
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    try:
        if (folder / "model.safetensors").is_file():
            weights = safetensors.torch.load_file(folder / "model.safetensors")
        else:
            weights = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except (OSError, RuntimeError) as error:
        raise SetupError(f"{folder}: the weights of its Dense module cannot be read") from error
    return torch.nn.Sequential(linear, _ACTIVATIONS[activation]())


def default_prompt(folder: Path) -> str:
    """The text that is put before every text, or before the first of a pair, by default. Raises SetupError."""
    path = folder / _SETTINGS
    name = read_settings(folder).get("default_prompt_name")
    prompts = read_prompts(folder)
    if name and name not in prompts:
        raise SetupError(f"{path}: default_prompt_name is {name!r}, which is none of its prompts")
    return prompts[name] if name else ""


def read_prompts(folder: Path) -> dict[str, str]:
    """The prompts by their names. Raises SetupError."""
    return {name: str(prompt or "") for name, prompt in (read_settings(folder).get("prompts") or {}).items()}


def read_settings(folder: Path) -> dict[str, Any]:
    """What sentence-transformers saved of a whole model; empty if it did not. Raises SetupError."""
    path = folder / _SETTINGS
    return dict(read_json(path)) if path.is_file() else {}
