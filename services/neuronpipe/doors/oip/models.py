"""The models of the protocol and their descriptions.

A served model has its own task under its name, its other tasks as NAME/TASK, and as NAME/raw the model itself.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Counter, Histogram, Labels, Meters
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.core.names import Metrics, Spans
from neuronpipe.core.tracing import status_name
from neuronpipe.doors.oip.raw_model import RawModel
from neuronpipe.doors.oip.task_model import STREAM, TaskModel
from neuronpipe.doors.oip.tensors import BYTES, GivenTensor, NamedTensor, TensorSpec, shown
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.tasks import TASKS

RAW = "raw"
PLATFORM = "neuronpipe"


class NamedModel:
    """One version of a model as callers name it. `spec`: the description of the served model."""

    def __init__(self, name: str, model: TaskModel | RawModel, served: ServedModel[GatewayModel]) -> None:
        self.name = name
        self.model = model
        self.spec = served.spec
        self.version = str(served.spec.version)
        self._caches_results = bool(served.resource.digest) and name != f"{served.spec.name}/{RAW}"
        self._inputs = {spec.name: spec for spec in model.inputs}
        self._outputs = {spec.name: spec for spec in model.outputs}

    def read(self, request_tensors: list[GivenTensor], max_rows: int) -> tuple[dict[str, NamedTensor], int]:
        """Returns the inputs by name, and the number of their rows. Raises InvalidInput."""
        tensors: dict[str, NamedTensor] = {}
        for tensor in request_tensors:
            name = tensor.name
            if name not in self._inputs:
                raise InvalidInput("inputs", f"there is no input {shown(name)}, only {', '.join(self._inputs)}")
            if name in tensors:
                raise InvalidInput(name, "is given twice")
            tensors[name] = self._inputs[name].read(tensor, max_rows)
        for name, spec in self._inputs.items():
            if name not in tensors and not spec.is_optional:
                raise InvalidInput(name, "is missing")
        rows = {name: read.shape[0] for name, read in tensors.items()}
        if len(set(rows.values())) > 1:
            raise InvalidInput("inputs", ", ".join(f"{name} has {count} rows" for name, count in rows.items()))
        return tensors, next(iter(rows.values()))

    def wanted(self, names: list[str]) -> list[TensorSpec]:
        """Returns the outputs with these names; all outputs for no names. Raises InvalidInput."""
        for name in names:
            if name not in self._outputs:
                raise InvalidInput("outputs", f"there is no output {shown(name)}, only {', '.join(self._outputs)}")
        if len(set(names)) < len(names):
            raise InvalidInput("outputs", "one is given twice")
        return [self._outputs[name] for name in names] or list(self._outputs.values())

    def properties(self) -> dict[str, str]:
        """Returns facts about the model, and the parameters that requests may have."""
        facts = {name: str(fact) for name, fact in self.spec.public_facts.items() if fact}
        if self.spec.labels:
            facts["labels"] = json.dumps(self.spec.labels, ensure_ascii=False)
        parameters = {f"parameters.{name}": text for name, text in self.model.parameters.items()}
        return {"architecture": self.spec.architecture, "max_tokens": str(self.spec.max_tokens)} | facts | parameters

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": versions,
            "platform": PLATFORM,
            "inputs": list(map(_metadata, self.model.inputs)),
            "outputs": list(map(_metadata, self.model.outputs)),
            "properties": self.properties(),
        }

    def config(self, max_rows: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": max_rows,
            "input": [_config(spec) | {"optional": spec.is_optional} for spec in self.model.inputs],
            "output": list(map(_config, self.model.outputs)),
            "dynamic_batching": {"priority_levels": 2, "default_priority_level": 1},
            "parameters": {name: {"string_value": text} for name, text in self.properties().items()},
            "model_transaction_policy": {"decoupled": STREAM in self.model.parameters},
            "response_cache": {"enable": self._caches_results},
        }


def named_models(table: ModelTable[ServedModel[GatewayModel]]) -> ModelTable[NamedModel]:
    """Returns every version of every model."""
    models = [NamedModel(name, form, served) for served in table for name, form in _forms(served.spec).items()]
    routes = {model.name: route for model in models if (route := table.routes.get(model.spec.name))}
    other_names = {
        alias + model.name.removeprefix(name): model.name
        for alias, name in table.other_names.items()
        for model in models
        if model.spec.name == name
    }
    return ModelTable({(model.name, model.spec.version): model for model in models}, routes, other_names)


def _forms(spec: ModelSpec) -> Mapping[str, TaskModel | RawModel]:
    tasks = {f"{spec.name}/{task}": TaskModel(task) for task in spec.also_answers}
    # Generating models and models of texts and images have no raw form: their tensors are not one row per sequence.
    has_rows = not TASKS[spec.task].generates and not (spec.image and spec.takes_texts)
    raw = {f"{spec.name}/{RAW}": RawModel(spec)} if has_rows else {}
    return {spec.name: TaskModel(spec.task), **tasks, **raw}


def _metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.dims]}


def _config(spec: TensorSpec) -> dict[str, Any]:
    kind = "STRING" if spec.datatype == BYTES else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.dims)}


_OK = status_name(None)
_HIT, _MISS = "hit_", "miss"
# Triton's names of the parts of a request.
_PARTS = {
    "queue": Spans.QUEUE,
    "compute_input": Spans.PREPROCESS,
    "compute_infer": Spans.COMPUTE,
    "compute_output": Spans.POSTPROCESS,
}


def statistics_of(meters: Meters, key: ModelKey) -> dict[str, Any]:
    """Returns the message ModelStatistics of a model, without name and version.

    Batches are counted only where the executor is in this process.
    """
    model = (key.name, str(key.version))
    # Instrument → the labels behind the name and version of the model → the series.
    series = {
        family.instrument: {labels[2:]: part for labels, part in family.series.items() if labels[:2] == model}
        for family in meters.families()
    }
    requests, stages, results, batches = (
        series.get(instrument, {})
        for instrument in (Metrics.REQUEST_DURATION, Metrics.STAGE_DURATION, Metrics.RESULT_CACHE, Metrics.BATCH_SIZE)
    )
    times = {name: _sum(stages, (span,).__eq__) for name, span in _PARTS.items()}
    return {
        "inference_count": times["compute_infer"]["count"],
        "execution_count": _sum(batches)["count"],
        "inference_stats": {
            "success": _sum(requests, lambda labels: labels == (_OK,)),
            "fail": _sum(requests, lambda labels: labels != (_OK,)),
            **times,
            "cache_hit": _sum(results, lambda labels: labels[0].startswith(_HIT)),
            "cache_miss": _sum(results, lambda labels: labels[0] == _MISS),
        },
    }


def _sum(series: Mapping[Labels, Any], is_counted: Callable[[Labels], bool] = lambda labels: True) -> dict[str, int]:
    """Returns the number of measurements of some series, and their sum in nanoseconds; a counter has only a number."""
    total = {"count": 0, "ns": 0}
    for labels, part in series.items():
        if isinstance(part, Histogram) and is_counted(labels):
            total["count"] += sum(part.counts)
            total["ns"] += int(part.total)
        elif isinstance(part, Counter) and is_counted(labels):
            total["count"] += int(part.value)
    return total
