"""Reads the modules of a sentence-transformers model: its transformer, pooling, and later layers.

Source of the formats: sentence-transformers 2 to 6, modules.json and the config.json of each module.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from neuronpipe.compiler.saved_files import read_json, read_object, refusing
from neuronpipe.core.errors import SetupError

CONFIGURATION = "config_sentence_transformers.json"
_PACKAGES = ("sentence_transformers", "pylate")
_POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TOKENS, VECTOR, SCORES = "token_embeddings", "sentence_embedding", "scores"
# Before version 6 each pooling mode had a flag, and the vectors were concatenated in this order.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_INSTRUCTOR = re.compile("hkunlp(/|--)instructor-")
_ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": torch.nn.Tanh,
    "torch.nn.modules.activation.GELU": torch.nn.GELU,
    "torch.nn.modules.activation.ReLU": torch.nn.ReLU,
    "torch.nn.modules.activation.SiLU": torch.nn.SiLU,
    "torch.nn.modules.activation.Sigmoid": torch.nn.Sigmoid,
    "torch.nn.modules.linear.Identity": torch.nn.Identity,
}


class TokenPooling(torch.nn.Module):
    """Pools token vectors by attention_mask to [batch, width x modes]; `pools_prompt`: also the tokens of a prompt."""

    def __init__(self, modes: Sequence[str], pools_prompt: bool = True) -> None:
        super().__init__()
        self.modes = tuple(modes)
        self.pools_prompt = pools_prompt

    def forward(self, token_vectors: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).to(token_vectors.dtype)
        tokens = mask.sum(1).clamp(min=1e-9)
        pooled = {
            "cls": lambda: token_vectors[:, 0] if self.pools_prompt else first_token(token_vectors, attention_mask),
            "max": lambda: token_vectors.masked_fill(mask == 0, -1e9).max(1).values,
            "mean": lambda: (token_vectors * mask).sum(1) / tokens,
            "mean_sqrt_len_tokens": lambda: (token_vectors * mask).sum(1) / tokens.sqrt(),
            "weightedmean": lambda: _weighted_mean(token_vectors, mask),
            "lasttoken": lambda: last_token(token_vectors, attention_mask),
        }
        return torch.cat([pooled[mode]() for mode in self.modes], dim=1)


def last_token(vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the vector of the last token at which a mask is 1, or else of the first token.

    `vectors` [batch, tokens, width] and `mask` [batch, tokens] to [batch, width]. A select and a sum choose the token,
    because every compiler of static shapes supports them, unlike an index. A product would not work: ModernBERT can
    compute NaN for padding.
    """
    numbers = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    is_last = numbers == (numbers * mask).max(dim=1, keepdim=True).values.clamp(min=1)
    return torch.where(is_last.unsqueeze(-1), vectors, torch.zeros_like(vectors)).sum(dim=1)


def first_token(vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the vector of the first token at which a mask is 1; see last_token."""
    backwards = torch.arange(mask.shape[1], 0, -1, device=mask.device)
    is_first = backwards == (backwards * mask).max(dim=1, keepdim=True).values.clamp(min=1)
    return torch.where(is_first.unsqueeze(-1), vectors, torch.zeros_like(vectors)).sum(dim=1)


def _weighted_mean(token_vectors: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Computes the mean in which the nth token counts n times."""
    weights = mask * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=mask.dtype).view(1, -1, 1)
    return (token_vectors * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class Layer(torch.nn.Module):
    """A module behind the model, which reads and writes vectors by their names, with the projected input, if any."""

    def __init__(
        self, module: torch.nn.Module, reads: str, writes: str, residual: torch.nn.Module | None = None
    ) -> None:
        super().__init__()
        self.module, self.residual = module, residual
        self.reads, self.writes = reads, writes

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        vectors = features[self.reads]
        made = self.module(vectors)
        return features | {self.writes: made if self.residual is None else made + self.residual(vectors)}


class Normalize(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vectors, p=2.0, dim=-1)


class Head(torch.nn.Module):
    """Pooling, and the layers before and after it. `dimensions`: how many numbers of the vector are kept."""

    def __init__(
        self,
        pooling: TokenPooling,
        before: Sequence[Layer] = (),
        after: Sequence[Layer] = (),
        output: str = VECTOR,
        dimensions: int | None = None,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.before, self.after = torch.nn.ModuleList(before), torch.nn.ModuleList(after)
        self._output, self._dimensions = output, dimensions

    def describe(self) -> str:
        count = len(self.before) + len(self.after)
        layers = f", with {count} further layer{'s' * (count > 1)}" if count else ""
        kept_numbers = (
            f", of which the first {self._dimensions} numbers are kept (truncate_dim)" if self._dimensions else ""
        )
        without_prompt = "" if self.pooling.pools_prompt else " without the prompt"
        return " and ".join(self.pooling.modes) + without_prompt + layers + kept_numbers

    def forward(
        self, token_vectors: torch.Tensor, attention_mask: torch.Tensor, prompt_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        features = {TOKENS: token_vectors}
        for layer in self.before:
            features = layer(features)
        if prompt_tokens is not None:
            attention_mask = attention_mask * (1 - prompt_tokens)
        features[VECTOR] = self.pooling(features[TOKENS], attention_mask)
        for layer in self.after:
            features = layer(features)
        return features[self._output][:, : self._dimensions]


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """The content of modules.json. `prompt` is put before every text; a request may name one of `prompts`."""

    model_folder: Path
    head: Head
    max_tokens: int | None = None
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)


def read_sentence_transformer(folder: Path, output: str = VECTOR) -> SentenceTransformer:
    """Reads the modules. `output`: SCORES for a cross-encoder. Raises SetupError if a module is not supported."""
    if not (folder / "modules.json").is_file():
        return SentenceTransformer(folder, Head(TokenPooling(["mean"])))
    model_folder, limits = folder, dict[str, Any]()
    poolings, layers = list[TokenPooling](), list[list[Layer]]([[], []])
    for number, (kind, path) in enumerate(read_modules(folder, is_known=True)):
        if kind == "Transformer" and not number:
            model_folder, limits = path, read_limits(path)
        elif kind == "Pooling" and not poolings:
            poolings.append(read_pooling(path))
        elif kind == "Dropout":  # used in training only
            continue
        elif kind in _LAYERS:
            layers[len(poolings)].append(_LAYERS[kind](path))
        else:
            raise SetupError(
                f"{folder}: modules.json has a module {kind}, supported are Transformer, Pooling, {', '.join(_LAYERS)} "
                "and Dropout, and of the first two one"
            )
    if "message" in (limits.get("modality_config") or ()):
        raise SetupError(
            f"{folder}: writes texts into a chat template (modality_config has message), which is not supported for "
            "embeddings"
        )
    if not poolings:
        raise SetupError(
            f"{folder}: modules.json has no Pooling module, so there is no one vector for a text; "
            "--task multi-vector-embedding compiles a model of late interaction (ColBERT)"
        )
    before, after = layers
    available = {TOKENS}
    for number, layer in enumerate([*before, *after]):
        available |= {VECTOR} if number >= len(before) else set()
        if layer.reads not in available:
            raise SetupError(f"{folder}: one of its modules reads {layer.reads}, which no module before it makes")
        available |= {layer.writes}
    if output not in {*available, VECTOR}:
        raise SetupError(f"{folder}: none of its modules makes {output}; a Dense module of a cross-encoder does")
    # Post-processing normalizes, unless the caller says otherwise.
    while output == VECTOR and after and isinstance(after[-1].module, Normalize) and after[-1].reads == VECTOR:
        after.pop()
    dimensions = applied_settings(folder).get("truncate_dim") if output == VECTOR else None
    return SentenceTransformer(
        model_folder,
        Head(poolings[0], before, after, output, dimensions),
        limits.get("max_seq_length"),
        default_prompt(folder),
        read_prompts(folder),
    )


def read_modules(folder: Path, *, is_known: bool = False) -> list[tuple[str, Path]]:
    """Reads the class and the folder of each module; none for a plain model.

    `is_known`: refuses code of the model's own.
    """
    path = folder / "modules.json"
    modules = read_json(path) if path.is_file() else []
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in modules
    ):
        raise SetupError(f"{path}: is no list of modules, each with a type and a path; get the file again")
    for module in modules:
        if not (folder / module["path"]).resolve().is_relative_to(folder.resolve()):
            raise SetupError(f"{path}: names {module['path']!r}, which is outside of the model")
        if is_known and module["type"].partition(".")[0] not in _PACKAGES:
            raise SetupError(f"{folder}: modules.json has a module {module['type']}, code of its own, which is not run")
    return [(module["type"].rpartition(".")[2], folder / module["path"]) for module in modules]


def transformer_folder(folder: Path) -> Path:
    """Returns the folder of the model's own config.json, which is the folder of the first module in old models."""
    return next((path for _, path in read_modules(folder)[:1] if (path / "config.json").is_file()), folder)


def read_limits(folder: Path) -> dict[str, Any]:
    """Reads the limits of inputs in a Transformer module; empty for a folder that is no module. Raises SetupError."""
    path = limits_file(folder)
    is_module = any((place / "modules.json").is_file() for place in (folder, folder.parent))
    return read_object(path) if path and is_module else {}


def limits_file(folder: Path) -> Path | None:
    """Finds the settings file of a Transformer module. Old models call it sentence_roberta_config.json, for example."""
    files = {path.name: path for path in folder.glob("sentence_*_config.json")}
    return files.get("sentence_bert_config.json") or next(iter(files.values()), None)


def read_pooling(folder: Path) -> TokenPooling:
    config = read_object(folder / "config.json")
    if config.get("pooling_mode"):
        modes = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    if unsupported := sorted({*map(str, modes)} - {*_POOLINGS}):
        raise SetupError(f"{folder.parent}: pooling {', '.join(unsupported)}; supported are {', '.join(_POOLINGS)}")
    pools_prompt = config["include_prompt"] if "include_prompt" in config else not _is_instructor(folder.parent)
    return TokenPooling(modes, pools_prompt=pools_prompt is not False)


def _is_instructor(folder: Path) -> bool:
    """Returns whether the model is Instructor, whose vectors leave out the prompt, the instruction.

    The settings do not say this. sentence-transformers knows the model by its name on the Hub, which is in the path of
    a download and in README.md.
    """
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    return bool(_INSTRUCTOR.search(f"{folder.resolve()} {text}"))


def read_dense(folder: Path, of: str = VECTOR) -> Layer:
    """Reads a Dense module. `of`: the vectors that it reads, unless its file names others. Raises SetupError."""
    config = read_object(folder / "config.json")
    activation = config.get("activation_function") or "torch.nn.modules.activation.Tanh"
    if activation not in _ACTIVATIONS:
        raise SetupError(f"{folder}: activation {activation}; supported are {', '.join(_ACTIVATIONS)}")
    reads = config.get("module_input_name") or of
    width, made = _widths(folder, config, "in_features", "out_features")
    parts = {"linear": torch.nn.Linear(width, made, bias=config.get("bias") is not False)}
    residual: torch.nn.Module | None = torch.nn.Identity() if config.get("use_residual") else None
    if residual is not None and width != made:
        residual = parts["residual"] = torch.nn.Linear(width, made, bias=False)
    _load_weights(folder, parts, "Dense")
    module = torch.nn.Sequential(parts["linear"], _ACTIVATIONS[activation]())
    return Layer(module, reads, config.get("module_output_name") or reads, residual)


def _read_layer_norm(folder: Path) -> Layer:
    (width,) = _widths(folder, read_object(folder / "config.json"), "dimension")
    norm = torch.nn.LayerNorm(width)
    _load_weights(folder, {"norm": norm}, "LayerNorm")
    return Layer(norm, VECTOR, VECTOR)


def read_normalize(folder: Path) -> Layer:
    """Reads a Normalize module, whose file may be missing. Raises SetupError."""
    config = read_object(folder / "config.json", may_lack=True) if folder.name else {}
    reads = config.get("module_input_name") or VECTOR
    return Layer(Normalize(), reads, config.get("module_output_name") or reads)


_LAYERS: Mapping[str, Callable[[Path], Layer]] = {
    "Dense": read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": read_normalize,
}


def _widths(folder: Path, config: Mapping[str, Any], *names: str) -> list[int]:
    if wrong := [name for name in names if not (isinstance(config.get(name), int) and config[name] >= 1)]:
        raise SetupError(f"{folder / 'config.json'}: has no number {' and '.join(wrong)} of 1 or more")
    return [config[name] for name in names]


def _load_weights(folder: Path, parts: Mapping[str, torch.nn.Module], kind: str) -> None:
    problem = f"{folder}: the weights of its {kind} module cannot be read; get its files again"
    with refusing(problem, why=None):
        torch.nn.ModuleDict(parts).load_state_dict(read_tensors(folder))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Reads the weights of a module by their names. Raises the errors of the libraries that read the file."""
    if (folder / "model.safetensors").is_file():
        return safetensors.torch.load_file(folder / "model.safetensors")
    weights: dict[str, torch.Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return weights


def default_prompt(folder: Path) -> str:
    """Returns the text that stands before every text, or before the first text of a pair, by default.

    Raises SetupError.
    """
    path = folder / CONFIGURATION
    name = applied_settings(folder).get("default_prompt_name")
    prompts = read_prompts(folder)
    if name and name not in prompts:
        raise SetupError(f"{path}: default_prompt_name is {name!r}, which is none of its prompts")
    return prompts[name] if name else ""


def read_prompts(folder: Path) -> dict[str, str]:
    prompts = applied_settings(folder).get("prompts") or {}
    if not isinstance(prompts, dict):
        raise SetupError(f"{folder / CONFIGURATION}: prompts are no object of names and texts")
    return {name: str(prompt or "") for name, prompt in prompts.items()}


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings that sentence-transformers saved for a whole model; empty without them. Raises SetupError."""
    return read_object(folder / CONFIGURATION, may_lack=True)


def applied_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings that sentence-transformers applies: none without a modules.json. Raises SetupError."""
    return read_settings(folder) if (folder / "modules.json").is_file() else {}
