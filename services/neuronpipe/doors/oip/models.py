"""The models of the protocol and their descriptions: of each that is served its own task under its name, NAME/TASK for
other tasks that it answers, and NAME/raw for the model itself.
"""

import json
from collections.abc import Mapping
from typing import Any

from neuronpipe.bundles.served import ServedModel
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Counter, Family, Histogram, Labels, Meters
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.core.names import Metrics, Spans
from neuronpipe.core.tracing import status_name
from neuronpipe.doors.oip.raw_model import RawModel
from neuronpipe.doors.oip.task_model import STREAM, TaskModel
from neuronpipe.doors.oip.tensors import BYTES, GivenTensor, Tensor, TensorSpec, shown
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.tasks import TASKS

RAW = "raw"
PLATFORM = "neuronpipe"


class NamedModel:
    """One version of a model as callers name it. `spec`: of the model that is served."""

    def __init__(self, name: str, model: TaskModel | RawModel, served: ServedModel[GatewayModel]) -> None:
        self.name = name
        self.model = model
        self.spec = served.spec
        self.version = str(served.spec.version)
        self._caches_results = bool(served.resource.digest) and name != f"{served.spec.name}/{RAW}"
        self._inputs = {one.name: one for one in model.inputs}
        self._outputs = {one.name: one for one in model.outputs}

    def read(self, given: list[GivenTensor], max_rows: int) -> tuple[dict[str, Tensor], int]:
        """The inputs by name, and how many rows they have. Raises InvalidInput."""
        tensors: dict[str, Tensor] = {}
        for one in given:
            spec = self._inputs.get(one.name)
            if spec is None:
                raise InvalidInput("inputs", f"there is no input {shown(one.name)}, only {', '.join(self._inputs)}")
            if one.name in tensors:
                raise InvalidInput(one.name, "is given twice")
            tensors[one.name] = spec.read(one, max_rows)
        for name, spec in self._inputs.items():
            if name not in tensors and not spec.is_optional:
                raise InvalidInput(name, "is missing")
        rows = {name: one.shape[0] for name, one in tensors.items()}
        if len(set(rows.values())) > 1:
            raise InvalidInput("inputs", ", ".join(f"{name} has {count} rows" for name, count in rows.items()))
        return tensors, next(iter(rows.values()))

    def wanted(self, names: list[str]) -> list[TensorSpec]:
        """The outputs of these names; all for none. Raises InvalidInput."""
        for name in names:
            if name not in self._outputs:
                raise InvalidInput("outputs", f"there is no output {shown(name)}, only {', '.join(self._outputs)}")
        if len(set(names)) < len(names):
            raise InvalidInput("outputs", "one is given twice")
        return [self._outputs[name] for name in names] or list(self._outputs.values())

    def properties(self) -> dict[str, str]:
        """Facts about the model, and what parameters requests may have."""
        facts = {name: str(fact) for name, fact in self.spec.told_facts.items() if fact}
        if self.spec.labels:
            facts["labels"] = json.dumps(self.spec.labels, ensure_ascii=False)
        parameters = {f"parameters.{name}": text for name, text in self.model.parameters.items()}
        return {"architecture": self.spec.architecture, "max_tokens": str(self.spec.max_tokens)} | facts | parameters

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """ModelMetadataResponse."""
        return {
            "name": self.name,
            "versions": versions,
            "platform": PLATFORM,
            "inputs": [_metadata(one) for one in self.model.inputs],
            "outputs": [_metadata(one) for one in self.model.outputs],
            "properties": self.properties(),
        }

    def config(self, max_rows: int) -> dict[str, Any]:
        """ModelConfig."""
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": max_rows,
            "input": [_config(one) | {"optional": one.is_optional} for one in self.model.inputs],
            "output": [_config(one) for one in self.model.outputs],
            "dynamic_batching": {"priority_levels": 2, "default_priority_level": 1},
            "parameters": {name: {"string_value": text} for name, text in self.properties().items()},
            "model_transaction_policy": {"decoupled": STREAM in self.model.parameters},
            "response_cache": {"enable": self._caches_results},
        }


def named_models(table: ModelTable[ServedModel[GatewayModel]]) -> ModelTable[NamedModel]:
    """Every version of every model."""
    named = [NamedModel(name, model, served) for served in table for name, model in _forms(served.spec).items()]
    routes = {one.name: route for one in named if (route := table.routes.get(one.spec.name))}
    other_names = {
        alias + one.name.removeprefix(name): one.name
        for alias, name in table.other_names.items()
        for one in named
        if one.spec.name == name
    }
    return ModelTable({(one.name, one.spec.version): one for one in named}, routes, other_names)


def _forms(spec: ModelSpec) -> Mapping[str, TaskModel | RawModel]:
    tasks = {f"{spec.name}/{task}": TaskModel(task) for task in spec.also_answers}
    # Neither has one row of tensors for each sequence: what generates, and what takes texts and images.
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
    """The message ModelStatistics of a model, without name and version. Batches are counted where the executor is in
    this process.
    """
    found = {family.instrument: _series(family, key) for family in meters.families()}
    requests, stages, results, batches = (
        found.get(instrument, {})
        for instrument in (Metrics.REQUEST_DURATION, Metrics.STAGE_DURATION, Metrics.RESULT_CACHE, Metrics.BATCH_SIZE)
    )
    times = {name: _sum(one for labels, one in stages.items() if labels == (part,)) for name, part in _PARTS.items()}
    return {
        "inference_count": times["compute_infer"]["count"],
        "execution_count": _sum(batches.values())["count"],
        "inference_stats": {
            "success": _sum(one for labels, one in requests.items() if labels == (_OK,)),
            "fail": _sum(one for labels, one in requests.items() if labels != (_OK,)),
            **times,
            "cache_hit": _sum(one for (word,), one in results.items() if word.startswith(_HIT)),
            "cache_miss": _sum(one for (word,), one in results.items() if word == _MISS),
        },
    }


def _series(family: Family, key: ModelKey) -> dict[Labels, Any]:
    """What an instrument has of a model, by the labels behind its name and version."""
    model = (key.name, str(key.version))
    return {labels[2:]: one for labels, one in family.series.items() if labels[:2] == model}


def _sum(series: Any) -> dict[str, int]:
    """How many there were, and how long they took in all; of a counter only how many."""
    total = {"count": 0, "ns": 0}
    for one in series:
        if isinstance(one, Histogram):
            total["count"] += sum(one.counts)
            total["ns"] += int(one.total)
        elif isinstance(one, Counter):
            total["count"] += int(one.value)
    return total
