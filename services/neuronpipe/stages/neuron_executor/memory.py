"""Maximum memory that an executor takes, in parts, by the formula of docs/deployment.md.

`neuronpipe check-deployment` computes it before the start, from the files of bundles alone. So does each executor,
which warns if the limit of its container is lower.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.backends import find_backend
from neuronpipe.stages.neuron_executor.runtimes.host import cpu_threads
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks import TASKS

_MIB = 1 << 20
# A compiled graph on OpenVINO without its copy of the weights.
_GRAPH_BYTES = 12 * _MIB
# The part of the graph of a matrix product on each further core.
_CORE_BYTES = 430_000
# A token while it is computed, per unit of the model's width.
_TOKEN_BYTES = 80
# A token that waits: its id, its type, and its part of the answer.
_QUEUED_TOKEN_BYTES = 8
# The width of a model whose file does not contain it.
_WIDTH = 1024
# Most tokens of a batch on a core, see ShapeMenu.
_MOST_TOKENS = 512
_MATRIX_PRODUCT = b'type="MatMul"'
_TABLE = re.compile(rb'<data element_type="\w+" shape="(\d+), ?(\d+)" offset="\d+" size="(\d+)"')


class _DtypeMemory(NamedTuple):
    """The memory of a compiled graph on OpenVINO, as far as it depends on the dtype of the artefact.

    - `copy_of_weights`: the size of its copy of the weights relative to the file without word tables.
    - `kernel_bytes`: a matrix product, per number of tokens of a batch: kernels of one and of all threads, and their
      descriptors.
    - `core_shape_bytes`: the same on each further core.
    """

    copy_of_weights: float
    kernel_bytes: int
    core_shape_bytes: int


_FLOAT32 = _DtypeMemory(1.6, 140_000, 25_000)
_BY_DTYPE = {"int8": _DtypeMemory(2.4, 340_000, 40_000), "bfloat16": _DtypeMemory(1.0, 120_000, 25_000)}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by their purpose; see docs/deployment.md."""

    process: int = 0
    weights: int = 0
    graphs: int = 0
    shapes: int = 0
    batches: int = 0
    lone_graphs: int = 0
    queue: int = 0
    key_value_cache: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns the bytes of each part that is not empty, largest first."""
        sizes = {part.name.replace("_", " "): getattr(self, part.name) for part in fields(self)}
        return {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size}


def plan_memory(bundles: Iterable[Bundle], settings: EngineSettings) -> MemoryPlan:
    """Plans the maximum memory of the host for an executor of these models. Raises SetupError if a file is missing.

    If models make room for others, the plan counts the largest models that fit into max_model_memory_bytes together.
    """
    names, plans = set(), []
    for bundle in bundles:
        artifact = bundle.artifact(settings.backend)
        names.add(artifact.backend)
        plans.append(_plan_of(bundle, artifact, settings))
    room = settings.max_model_memory_bytes if settings.models_on_demand else 0
    fitting_plans = list(_largest_within(plans, room)) if room else plans
    # Weights for a device pass through the host, one model after the other.
    combine = sum if names <= {"openvino", "fake"} else max
    return MemoryPlan(
        process=max((find_backend(name).process_bytes for name in names), default=0),
        weights=combine([plan.weights for plan in fitting_plans] or [0]),
        graphs=sum(plan.graphs for plan in fitting_plans),
        shapes=sum(plan.shapes for plan in fitting_plans),
        # The maximum, not the sum: models of a back end share its cores.
        batches=max((plan.batches for plan in fitting_plans), default=0),
        lone_graphs=settings.lone_graph_bytes if any(plan.shapes for plan in fitting_plans) else 0,
        queue=sum(plan.queue for plan in fitting_plans),
        key_value_cache=sum(plan.key_value_cache for plan in fitting_plans),
    )


def memory_shortage(bundles: Iterable[Bundle], settings: EngineSettings, limit_bytes: int | None) -> str:
    """Returns a warning if the container's limit is below the plan; else an empty text."""
    if limit_bytes is None or (plan := plan_memory(bundles, settings)).total <= limit_bytes:
        return ""
    parts = ", ".join(f"{name} {-(-size // _MIB)}" for name, size in plan.parts().items())
    return (
        f"memory: the container's limit is {limit_bytes // _MIB} MiB, and these models may take "
        f"{-(-plan.total // _MIB)} MiB ({parts}); raise the limit, or lower lone_graph_bytes, cores, or the number of "
        "models"
    )


def _largest_within(plans: Iterable[MemoryPlan], room: int) -> Iterator[MemoryPlan]:
    for plan in sorted(plans, key=lambda plan: -plan.total):
        if (size := plan.weights + plan.key_value_cache) <= room:
            room -= size
            yield plan


def _plan_of(bundle: Bundle, artifact: Artifact, settings: EngineSettings) -> MemoryPlan:
    spec = bundle.spec
    files = [bundle.folder / name for name in artifact.files]
    try:
        weights = sum(file.stat().st_size for file in files)
        graphs = [file.read_bytes() for file in files if file.suffix == ".xml"]
    except FileNotFoundError as error:
        raise SetupError(f"{error.filename}: is missing; compile the model again") from error
    generates = TASKS[spec.task].generates
    cache = settings.kv_cache_bytes if generates and artifact.backend != "neuronx" else 0
    queue = settings.max_queue_sequences * spec.max_tokens * _QUEUED_TOKEN_BYTES
    if artifact.backend != "openvino":
        return MemoryPlan(weights=weights, queue=queue, key_value_cache=cache)
    tables = [table for graph in graphs for table in _TABLE.findall(graph) if int(table[0]) >= spec.vocabulary_size > 0]
    table_bytes = sum(int(size) for *_, size in tables)
    width = max((int(columns) for _, columns, _ in tables), default=_WIDTH)
    threads = cpu_threads(settings.threads, settings.core_count)
    cores = settings.core_count or threads
    copies, dtype = 1 if generates or cores == 1 else 2, _BY_DTYPE.get(artifact.dtype, _FLOAT32)
    graph = _GRAPH_BYTES + int(dtype.copy_of_weights * max(0, weights - table_bytes))
    return MemoryPlan(
        weights=weights,
        graphs=copies * graph,
        shapes=0 if generates else _bytes_of_shapes(spec, dtype, graphs, cores),
        batches=cores * max(_MOST_TOKENS, spec.max_tokens) * width * _TOKEN_BYTES,
        queue=queue,
        key_value_cache=cache,
    )


def _bytes_of_shapes(spec: ModelSpec, dtype: _DtypeMemory, graphs: Iterable[bytes], cores: int) -> int:
    products = sum(graph.count(_MATRIX_PRODUCT) for graph in graphs)
    totals = len(ShapeMenu(spec, _MOST_TOKENS).batch_tokens)
    further_cores_bytes = (cores - 1) * (_CORE_BYTES + totals * dtype.core_shape_bytes)
    return products * (totals * dtype.kernel_bytes + further_cores_bytes)
