"""The rest of the documented surface: several cores behind one call, several buckets in one module, analysis."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torch_neuronx import _runtime
from torch_neuronx._model import Model, dynamic_batch, model_of
from torch_neuronx._trace import trace
from torch_neuronx._versions import VERSION


class DataParallel(torch.nn.Module):
    """Splits a batch over cores and joins the outputs."""

    def __init__(
        self, model: Any, device_ids: Sequence[int | str] | None = None, dim: int = 0, set_dynamic_batching: bool = True
    ) -> None:
        super().__init__()
        try:
            runtime = _runtime.runtime()
        except RuntimeError as error:
            text = "Neuron runtime cannot be initialized; cannot determine the number of available NeuronCores"
            raise RuntimeError(text) from error
        indices = (
            [int(str(one).removeprefix("nc:")) for one in device_ids]
            if device_ids is not None
            else range(len(runtime.cores))
        )
        compiled = model_of(model)
        if compiled is None:
            raise TypeError(f"{type(model).__name__} was not compiled")
        self._rows = compiled.stamp["inputs"][0][0][dim]
        self._dim = dim
        self.num_workers = 2 * len(indices)
        self.split_size: int | None = None
        self._is_dynamic = set_dynamic_batching and dim == 0
        if self._is_dynamic:
            dynamic_batch(model)
        self._replicas: list[Model] = []
        for index in indices:
            replica = Model(model, compiled.stamp | {"dynamic": self._is_dynamic})
            replica.load(index, 1)
            self._replicas.append(replica)

    def disable_dynamic_batching(self) -> None:
        """From now on the parts must have the compiled size."""
        self._is_dynamic = False
        for replica in self._replicas:
            replica.stamp = replica.stamp | {"dynamic": False}

    def forward(self, *inputs: torch.Tensor) -> Any:
        length = inputs[0].shape[self._dim]
        if not self._is_dynamic and length != self._rows * len(self._replicas):
            raise ValueError(f"{length} rows, must be {self._rows} for each of {len(self._replicas)} cores")
        size = self.split_size or max(1, -(-length // len(self._replicas)))
        parts = list(zip(*(tensor.split(size, self._dim) for tensor in inputs), strict=True))

        def run(number: int) -> list[torch.Tensor]:
            index = number % len(self._replicas)
            try:
                return self._replicas[index].execute(list(parts[number]))
            except RuntimeError as error:
                raise RuntimeError(f"Caught RuntimeError on neuroncore {index}.") from error

        with ThreadPoolExecutor(self.num_workers) as pool:
            outputs = list(pool.map(run, range(len(parts))))
        return tuple(torch.cat(list(tensors), self._dim) for tensors in zip(*outputs, strict=True))


class PartitionerConfig:
    """Which operators to leave to the CPU."""

    def __init__(
        self,
        *,
        trace_kwargs: Any = None,
        model_support_percentage_threshold: float = 0.5,
        min_subgraph_size: int = -1,
        max_subgraph_count: int = -1,
        ops_to_partition: Any = None,
        analyze_parameters: Any = None,
    ) -> None:
        self.settings = {name: value for name, value in locals().items() if name != "self"}


class BucketModelConfig:
    """How to choose a bucket for inputs."""

    def __init__(
        self,
        bucket_kernel: Callable[[], Any],
        *_: Any,
        shared_state_buffer: Any = None,
        shared_state_buffer_preprocessor: Any = None,
        func_kwargs: Any = None,
    ) -> None:
        if _:
            raise RuntimeError("arguments after bucket_kernel are keywords")
        self.bucket_kernel = bucket_kernel
        self.func_kwargs = func_kwargs


class _Buckets(torch.nn.Module):
    def __init__(self, kernel: Any, models: list[Any]) -> None:
        super().__init__()
        self._kernel, self._models = kernel, models

    def forward(self, *inputs: torch.Tensor) -> Any:
        padded, index = self._kernel(list(inputs))
        return self._models[int(index)](*padded)


def bucket_model_trace(
    func: Callable[..., Any],
    example_inputs: Any,
    bucket_config: BucketModelConfig,
    compiler_workdir: Any = None,
    compiler_args: Any = None,
) -> Any:
    """One module for several buckets. Not scripted here, so it cannot be saved."""
    if not isinstance(example_inputs, list):
        raise TypeError(f"example_inputs: a list with an entry for each bucket, got {type(example_inputs).__name__}")
    kwargs = bucket_config.func_kwargs or {}
    models = []
    for index, inputs in enumerate(example_inputs):
        model, aliases = func(**(kwargs[index] if isinstance(kwargs, list) else kwargs))
        traced = trace(
            model, inputs, input_output_aliases=aliases, compiler_workdir=compiler_workdir, compiler_args=compiler_args
        )
        models.append(traced)
    kernel = bucket_config.bucket_kernel()
    if not isinstance(kernel, torch.jit.ScriptFunction):
        raise TypeError("bucket_kernel returns a function of torch.jit.script")
    return _Buckets(kernel, models)


def analyze(
    func: Any,
    example_inputs: Any,
    compiler_workdir: Any = None,
    *,
    additional_ignored_ops: Any = frozenset(),
    max_workers: int = 4,
    is_hf_transformers: bool = False,
    cleanup: bool = False,
) -> dict[str, Any]:
    """Which operators are supported: here all of them."""
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    graph = torch.jit.trace(func, inputs, strict=False).inlined_graph
    counts: dict[str, int] = {}
    for node in graph.nodes():
        if node.kind().startswith("aten::"):
            counts[node.kind()] = counts.get(node.kind(), 0) + 1
    return {
        "torch_neuronx_version": VERSION,
        "neuronx_cc_version": "double",
        "support_percentage": "100.00%",
        "supported_operators": counts,
        "unsupported_operators": [],
    }
