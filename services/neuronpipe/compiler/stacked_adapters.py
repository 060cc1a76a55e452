"""LoRA adapters that a request names, in the graph of their base model (`--adapter NAME=FOLDER`).

Each row of a batch has a number: 0 for the base alone, and the adapter's place from 1 on. A linear layer y = Wx that
adapters change becomes y = Wx + B[number] A[number] x. A and B are stacks of all adapters, 0 for the base, and padded
with zeros to the largest rank. A layer that adapters were saved with (modules_to_save) becomes a stack of the layer.
Source: LoRA, arXiv 2106.09685; rows of different adapters in one batch as in Punica, arXiv 2310.18547.
"""

import copy
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn.functional import pad

from neuronpipe.compiler.modules import SourceModule, classifier_facts, labels_of, pretrained_model
from neuronpipe.compiler.onnx import onnx_model
from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.saved_settings import check_adapter
from neuronpipe.compiler.source import ADAPTER_CONFIG
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ADAPTER, AdapterSpec
from neuronpipe.tasks import TASKS

TASKS_WITH_ADAPTERS = ("text_classification", "token_classification", "sentence_embedding", "feature_extraction")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# The ends of the names of an adapter's tensors, and the matrix of each.
_MATRICES = {".lora_A.weight": "down", ".lora_B.weight": "up", ".lora_embedding_A": "down", ".lora_embedding_B": "up"}
# Fields of adapter_config.json with other values than these need more than two matrices and one factor for a layer.
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"), False),
    **dict.fromkeys(("alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters"), None),
}


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter. `pairs`: A [rank, in] and B [out, rank] of each layer, B with the factor; `saved`: other tensors."""

    spec: AdapterSpec
    pairs: Mapping[str, Mapping[str, torch.Tensor]]
    saved: Mapping[str, torch.Tensor]


class _Rows:
    """The number of each row's adapter, int64 [batch], while the model runs."""

    numbers = torch.zeros(0, dtype=torch.int64)


class _Stacks(torch.nn.Module):
    """A layer with stacks, float32 [adapters, …]. `taken`: stacks to use instead, while a graph is traced."""

    def __init__(self, rows: _Rows, layer: torch.nn.Module | None = None, **stacks: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.layer = rows, layer
        self.taken: dict[str, torch.Tensor] = {}
        for name, stack in stacks.items():
            self.register_buffer(name, stack)

    def stack(self, name: str) -> torch.Tensor:
        return self.taken[name] if self.taken else self.get_buffer(name)

    def select(self, name: str) -> torch.Tensor:
        """Returns the part of a stack for each row."""
        return self.stack(name).index_select(0, self.rows.numbers)


class _AdaptedLinear(_Stacks):
    """A linear layer; each adapter has A as `down` [adapters, in, rank], and B as `up` [adapters, rank, out]."""

    @property
    def weight(self) -> Any:
        return self.get_parameter("layer.weight")

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.get_submodule("layer")(vectors)
        return result + (_by_token(vectors) @ self.select("down") @ self.select("up")).reshape(result.shape)


class _AdaptedEmbedding(_AdaptedLinear):
    """An embedding; each adapter has `down` [adapters, tokens, rank]."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.get_submodule("layer")(ids)
        down = self.stack("down")
        places = self.rows.numbers[:, None] * down.shape[1] + ids
        return result + torch.nn.functional.embedding(places, down.flatten(0, 1)) @ self.select("up")


class _StackedLinear(_Stacks):
    """A linear layer that adapters were saved with: `matrix` [adapters, in, out] and `offset` [adapters, out]."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result = _by_token(vectors) @ self.select("matrix") + self.select("offset")[:, None]
        return result if vectors.dim() == 3 else result[:, 0]


def _by_token(vectors: torch.Tensor) -> torch.Tensor:
    """Gives vectors an axis of tokens, [batch, tokens, in], also for layers that see a single token, [batch, in]."""
    return vectors if vectors.dim() == 3 else vectors[:, None]


class _ByRow(torch.nn.Module):
    """A module with one more input, the adapter's number at each token, int64 [batch, tokens]."""

    def __init__(self, module: torch.nn.Module, rows: _Rows) -> None:
        super().__init__()
        self.module = module
        self._rows = rows

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        prompt_tokens: torch.Tensor | None = None,
        adapter: torch.Tensor | None = None,
    ) -> Any:
        assert adapter is not None  # noqa: S101 (the input that the module is made for)
        further = {"token_type_ids": token_type_ids, "prompt_tokens": prompt_tokens}
        self._rows.numbers = adapter[:, 0]
        try:
            return self.module(
                input_ids, attention_mask, **{name: tensor for name, tensor in further.items() if tensor is not None}
            )
        finally:
            del self._rows.numbers


class TakingStacks(torch.nn.Module):
    """A module that gets its stacks as further inputs, by their names."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **tensors: torch.Tensor) -> Any:
        parts = _parts_of(self.module)
        for path, part in parts.items():
            part.taken = {name: tensors.pop(f"{path}.{name}") for name, _ in part.named_buffers(recurse=False)}
        try:
            return self.module(**tensors)
        finally:
            for part in parts.values():
                part.taken = {}


def stacks_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the stacks of a module with adapters, by name: float32 [adapters, …]; empty without adapters."""
    parts = _parts_of(module).items()
    return {f"{path}.{name}": stack for path, part in parts for name, stack in part.named_buffers(recurse=False)}


def _parts_of(module: torch.nn.Module) -> dict[str, _Stacks]:
    return {path: part for path, part in module.named_modules() if isinstance(part, _Stacks)}


def stacks_sha256(module: torch.nn.Module) -> str:
    """Computes the digest of a module's stacks and their names."""
    digest = hashlib.sha256()
    for name, stack in stacks_of(module).items():
        digest.update(f"{name} {tuple(stack.shape)} ".encode() + stack.numpy().tobytes())
    return digest.hexdigest()


def with_adapters(module: SourceModule, adapters: Sequence[str]) -> SourceModule:
    """Puts adapters, each NAME=FOLDER, into the model of a module. Raises SetupError, which names the adapter."""
    if not adapters:
        return module
    if module.task not in TASKS_WITH_ADAPTERS or onnx_model(module.module):
        kind = "a graph of ONNX" if onnx_model(module.module) else f"the task {module.task}"
        supported = f"only for {', '.join(TASKS_WITH_ADAPTERS)}; --merge-adapter compiles one adapter with its base"
        raise SetupError(f"--adapter: not supported for {kind}, {supported}")
    model, rows = pretrained_model(module.module), _Rows()
    read = [_read(written, model, module) for written in adapters]
    names = [adapter.spec.name for adapter in read]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise SetupError(f"--adapter: several have the name {', '.join(repeated)}")
    for path in dict.fromkeys(path for adapter in read for path in adapter.pairs):
        model.set_submodule(path, _adapted(model.get_submodule(path), path, rows, read))
    saved = dict.fromkeys(name.rpartition(".")[0] for adapter in read for name in adapter.saved)
    # Only parameters that the files of the base lack require gradients; see load_weights.
    lacking = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    lacking = {name for name in lacking if name.rpartition(".")[0] in saved}
    for adapter in read:
        if untrained := sorted(lacking - {*adapter.saved}):
            raise SetupError(f"--adapter {adapter.spec.name}: has no {untrained[0]}, and neither has its base model")
    for path in saved:
        model.set_submodule(path, _stacked(model.get_submodule(path), path, rows, read))
    return replace(
        module,
        module=_ByRow(module.module, rows).eval(),
        inputs=(*module.inputs, ADAPTER),
        adapters=tuple(adapter.spec for adapter in read),
        needs_adapter=bool(lacking),
    )


def _read(written: str, model: Any, module: SourceModule) -> _Adapter:
    """Reads an adapter's folder. Raises SetupError for another method than LoRA, and for another base model."""
    name, _, location = written.partition("=")
    folder, problem = Path(location), f"--adapter {written}"
    if not location or not _NAME.fullmatch(name):
        raise SetupError(f"{problem}: write NAME=FOLDER, with a NAME of letters, digits, dots, - and _")
    if name in (*TASKS, "raw"):  # OIP's names of a model's other forms
        raise SetupError(f"{problem}: {name} is the name of a task, or of the raw model; take another NAME")
    for file in (ADAPTER_CONFIG, _WEIGHTS):
        if not (folder / file).is_file():
            raise SetupError(f"{problem}: {folder} has no {file}")
    settings = read_object(folder / ADAPTER_CONFIG)
    check_adapter(folder / ADAPTER_CONFIG, settings)
    for field, plain in _PLAIN.items():
        if (value := settings.get(field)) and value != plain:
            said = f"{ADAPTER_CONFIG} sets {field} to {value!r}, which is not supported by request"
            raise SetupError(f"{problem}: {said}; --merge-adapter compiles the adapter with its base")
    with refusing(f"{folder / _WEIGHTS}: cannot be read; get the file again", why=None):
        tensors = safetensors.torch.load_file(folder / _WEIGHTS)
    pairs, saved = dict[str, dict[str, torch.Tensor]](), dict[str, torch.Tensor]()
    for key, tensor in tensors.items():
        end = next((end for end in _MATRICES if key.endswith(end)), "")
        path = _path_in(model, key.removeprefix(_PREFIX).removesuffix(end), is_module=bool(end))
        if not path:
            base = settings.get("base_model_name_or_path")
            raise SetupError(f"{problem}: its base model has no {key}; it was trained for {base}")
        if end:
            pairs.setdefault(path, {})[_MATRICES[end]] = tensor.float()
        else:
            saved[path] = tensor.float()
    alpha = float(settings.get("lora_alpha") or 8)  # peft's default
    for pair in pairs.values():
        rank = len(pair["down"])
        pair["up"] = pair["up"] * alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return _Adapter(_spec(name, folder, model, module, saved), pairs, saved)


def _path_in(model: Any, path: str, *, is_module: bool) -> str:
    """Returns the name of a module or parameter in the model; empty if there is none.

    An adapter writes the name with or without its base's prefix.
    """
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in (model.named_modules() if is_module else model.named_parameters())}
    return next((name for name in (path, path.removeprefix(prefix), prefix + path) if name in names), "")


def _spec(name: str, folder: Path, model: Any, module: SourceModule, saved: Mapping[str, torch.Tensor]) -> AdapterSpec:
    """Describes an adapter, with its labels if it has a head of its own.

    config.json in the adapter's folder names the labels, or else the base names them.
    """
    body = f"{model.base_model_prefix}."
    linear = [path for path, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    head = next((f"{path}.weight" for path in reversed(linear) if not path.startswith(body)), "")
    if not module.labels or head not in saved:
        return AdapterSpec(name=name)
    config = copy.deepcopy(model.config)
    if (folder / "config.json").is_file():
        content = read_object(folder / "config.json")
        config.problem_type = content.get("problem_type")
        config.id2label = {int(number): label for number, label in (content.get("id2label") or {}).items()}
    if len(config.id2label) != len(saved[head]):
        config.num_labels = len(saved[head])
    function = classifier_facts(config).score_function if module.task == "text_classification" else ""
    return AdapterSpec(name=name, labels=labels_of(config), score_function=function)


def _adapted(layer: torch.nn.Module, path: str, rows: _Rows, adapters: Sequence[_Adapter]) -> torch.nn.Module:
    pairs = {number: adapter.pairs[path] for number, adapter in enumerate(adapters, 1) if path in adapter.pairs}
    is_embedding = isinstance(layer, torch.nn.Embedding)
    for number, pair in pairs.items():
        if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            problem = f"{path} is a {type(layer).__name__}, neither a linear layer nor an embedding"
            raise SetupError(f"--adapter {adapters[number - 1].spec.name}: {problem}")
        if (len(pair["up"]), pair["down"].shape[1]) != tuple(
            layer.weight.T.shape if is_embedding else layer.weight.shape
        ):
            raise SetupError(f"--adapter {adapters[number - 1].spec.name}: {path} has another size in its base model")
    rank = max(len(pair["down"]) for pair in pairs.values())
    first = next(iter(pairs.values()))
    down = torch.zeros(1 + len(adapters), rank, first["down"].shape[1])
    up = torch.zeros(1 + len(adapters), rank, len(first["up"]))
    for number, pair in pairs.items():
        down[number, : len(pair["down"])], up[number, : len(pair["down"])] = pair["down"], pair["up"].T
    kind = _AdaptedEmbedding if is_embedding else _AdaptedLinear
    return kind(rows, layer, down=down.transpose(1, 2).contiguous(), up=up)


def _stacked(layer: torch.nn.Module, path: str, rows: _Rows, adapters: Sequence[_Adapter]) -> torch.nn.Module:
    """Stacks a layer of the base, and the layer of each adapter that has its own. Pads missing outputs with zeros."""
    if not isinstance(layer, torch.nn.Linear):
        kind = type(layer).__name__
        raise SetupError(f"--adapter: {path}, of modules_to_save, is a {kind}; only linear layers are supported")
    zeros = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
    weights = [layer.weight, *(adapter.saved.get(f"{path}.weight", layer.weight) for adapter in adapters)]
    biases = [zeros, *(adapter.saved.get(f"{path}.bias", zeros) for adapter in adapters)]
    outputs = max(map(len, weights))
    with torch.no_grad():
        matrix = torch.stack([pad(weight.T, (0, outputs - len(weight))) for weight in weights])
        offset = torch.stack([pad(bias, (0, outputs - len(bias))) for bias in biases])
    return _StackedLinear(rows, matrix=matrix, offset=offset)
