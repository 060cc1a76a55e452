"""Models that are published as an ONNX graph alone, for the OpenVINO back end, which reads the graph as it is.

The modules behind the graph (pooling, dense layers) are as for other models. ONNX Runtime replaces PyTorch: the
artefact is compared with its outputs. Sources: optimum's names of inputs and outputs; sentence-transformers 6,
backend/load.py. The only file that imports onnxruntime.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.architectures import MASKED_DECODERS
from neuronpipe.compiler.saved_files import refusing
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.core.errors import SetupError

# The tasks that change nothing within the model.
TASKS = (
    *("sentence_embedding", "sentence_similarity", "feature_extraction", "text_classification", "rerank"),
    *("zero_shot_classification", "token_classification", "question_answering"),
)
HIDDEN = "last_hidden_state"
GRAPHS = ("onnx/*.onnx", "*.onnx")
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENS = "token_embeddings"
_FLOAT = "tensor(float)"
_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


def has_weights(folder: Path) -> bool:
    return any(path for kind in _WEIGHTS for path in folder.glob(kind))


def graph_file(folder: Path) -> Path | None:
    """Finds the graph of a folder without weights of PyTorch, or None. Raises SetupError if several are possible."""
    folder = transformer_folder(folder)
    if has_weights(folder):
        return None
    graphs = [path for pattern in GRAPHS for path in sorted(folder.glob(pattern))]
    standard_graphs = [path for path in graphs if path.name == "model.onnx"]
    if len(graphs) > 1 and not standard_graphs:
        names = ", ".join(str(path.relative_to(folder)) for path in graphs)
        raise SetupError(f"{folder}: has several ONNX graphs, and none is model.onnx: {names}; keep one of them")
    return next(iter([*standard_graphs, *graphs]), None)


class OnnxModel(torch.nn.Module):
    """A graph that is called like a model of transformers: tensors by name, to a dictionary of its outputs."""

    def __init__(self, folder: Path, path: Path) -> None:
        """Raises SetupError if ONNX Runtime cannot run the graph, or if texts lack one of its inputs."""
        super().__init__()
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            advice = "to compare it needs the package onnxruntime: pip install 'neuronpipe[compile-onnx]'"
            raise SetupError(f"{folder}: has an ONNX graph and no weights of PyTorch; {advice}") from error
        self.path = path
        self.config = transformers.AutoConfig.from_pretrained(transformer_folder(folder), trust_remote_code=False)
        if self.config.model_type in MASKED_DECODERS:
            raise SetupError(f"{path}: the graph of a decoder is not supported; get model.safetensors as well")
        with refusing(f"{path}: ONNX Runtime cannot load it", advice="; get the file again"):
            self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = tuple(port.name for port in self._session.get_inputs())
        self.outputs = tuple(port.name for port in self._session.get_outputs())
        if unknown := sorted({*self.inputs} - _INPUTS):
            advice = f"supported are graphs that take {', '.join(sorted(_INPUTS))}"
            raise SetupError(f"{path}: takes {', '.join(unknown)}, which texts do not have; {advice}")
        if others := [port.name for port in self._session.get_outputs() if port.type != _FLOAT]:
            raise SetupError(f"{path}: its outputs {', '.join(others)} are no float32 numbers; export it in float32")

    @property
    def architecture(self) -> str:
        return str((self.config.architectures or [type(self.config).__name__])[0])

    def output(self, name: str) -> str:
        """Returns the graph's name of an output. Raises SetupError if it is missing."""
        names = (name, _TOKENS) if name == HIDDEN else (name,)
        graph_name = next((known_name for known_name in names if known_name in self.outputs), None)
        if graph_name is None:
            problem = f"has no output {name}, which the task needs, only {', '.join(self.outputs)}"
            raise SetupError(f"{self.path}: {problem}; export it for the task")
        return graph_name

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        **unused: Any,
    ) -> Mapping[str, torch.Tensor]:
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        if token_type_ids is None and "token_type_ids" in self.inputs:
            tensors["token_type_ids"] = torch.zeros_like(input_ids)
        values = {name: np.asarray(tensors[name], np.int64) for name in self.inputs}
        computed = map(torch.from_numpy, self._session.run(None, values))
        return _NamedOutputs(self, zip(self.outputs, computed, strict=True))


class _NamedOutputs(dict[str, torch.Tensor]):
    """Outputs by transformers' names. Raises SetupError if the graph lacks an output."""

    def __init__(self, model: OnnxModel, outputs: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__(outputs)
        self._model = model

    def __missing__(self, name: str) -> torch.Tensor:
        return self[self._model.output(name)]


def check_task(folder: Path, task: str) -> None:
    if (path := graph_file(folder)) is not None and task not in TASKS:
        raise SetupError(
            f"{folder}: has no weights of PyTorch, only the graph {path.name}, and {task.replace('_', '-')} changes "
            f"the model within; of graphs there are {', '.join(TASKS)}; get model.safetensors as well"
        )


def onnx_model(module: torch.nn.Module) -> OnnxModel | None:
    return next((part for part in module.modules() if isinstance(part, OnnxModel)), None)
