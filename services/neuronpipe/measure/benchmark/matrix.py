"""The cells of a run: a star around one point, or every combination.

The point is the first batch, the base length, the first dtype and the first number of cores. From it one thing is
varied at a time, as the published tables do; all combinations of the default values would take a day on two CPUs.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.models import BenchmarkModel
from neuronpipe.stages.neuron_executor.runtimes.neuron import MAX_CORES

LATENCY, THROUGHPUT = "latency", "throughput"
MODES = (LATENCY, THROUGHPUT)
MAX_BATCH, MAX_LENGTH, MAX_CELLS = 4096, 1 << 17, 10_000


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """What one process loads. `cores`: replicas of the model that share the machine's CPUs, or devices' cores."""

    model: str
    backend: str
    dtype: str
    cores: int


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One configuration. `length`: tokens of each input, special tokens included; 0 for images, which are of one size.

    Mode latency: one caller, who sends a batch when the last one is answered. Throughput: one such caller for each
    core.
    """

    variant: Variant
    mode: str
    batch: int
    length: int

    @property
    def callers(self) -> int:
        """Who calls at the same time."""
        return 1 if self.mode == LATENCY else self.variant.cores

    @property
    def name(self) -> str:
        """For lines of progress and errors."""
        one = self.variant
        shape = f"{self.batch}x{self.length}" if self.length else f"{self.batch} images"
        cores = f"{one.cores} core{'s' if one.cores > 1 else ''}"
        return f"{one.model}, {one.backend}, {one.dtype}, {cores}, {self.mode}, {shape}"


@dataclass(frozen=True, slots=True)
class MatrixRequest:
    """What is varied. Raises SetupError, which names the option, for a value that is out of range.

    `throughput_batches`: of cells with other dtypes, and of those of mode throughput.
    """

    models: Sequence[BenchmarkModel]
    lengths: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    throughput_batches: Sequence[int] = (1, 8)
    dtypes: Sequence[str] = ("float32",)
    backends: Sequence[str] = ("openvino",)
    cores: Sequence[int] = (1,)
    modes: Sequence[str] = MODES
    base_length: int = 128
    is_product: bool = False

    def __post_init__(self) -> None:
        for option, values, limit in (
            ("--lengths", self.lengths, MAX_LENGTH),
            ("--batches", self.batches, MAX_BATCH),
            ("--throughput-batches", self.throughput_batches, MAX_BATCH),
            ("--cores", self.cores, MAX_CORES),
            ("--base-length", (self.base_length,), MAX_LENGTH),
        ):
            if not values:
                raise SetupError(f"{option}: is empty")
            for value in values:
                if not 1 <= value <= limit:
                    raise SetupError(f"{option} {value}: must be from 1 to {limit:,}")
        if unknown := sorted(set(self.modes) - set(MODES)):
            raise SetupError(f"--modes {unknown[0]}: must be some of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells in the order in which they are measured: those of a variant together, the shortest first."""

    models: Sequence[BenchmarkModel]
    cells: Sequence[Cell] = field(default_factory=tuple)

    @property
    def variants(self) -> dict[Variant, list[Cell]]:
        """Each with its cells."""
        found: dict[Variant, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.variant, []).append(cell)
        return found

    def model(self, name: str) -> BenchmarkModel:
        """By its name."""
        return next(model for model in self.models if model.name == name)

    def buckets(self, model: str, backend: str, dtype: str) -> tuple[str, ...]:
        """What a bundle for neuronx is compiled for, as 8x128; empty for back ends that compute any shape.

        Of all its cells, also of those that are measured already or with other cores: a cell without a bucket of its
        own would be computed in a larger one.
        """
        cells = [one for one in self.cells if one.length and backend == "neuronx"]
        wanted = (model, backend, dtype)
        return tuple(
            dict.fromkeys(
                f"{one.batch}x{one.length}"
                for one in cells
                if (one.variant.model, one.variant.backend, one.variant.dtype) == wanted
            )
        )


def make_matrix(request: MatrixRequest) -> Matrix:
    """Raises SetupError for more cells than anybody waits for."""
    make = _product if request.is_product else _star
    cells: list[Cell] = []
    for model in request.models:
        of_bundle = model.only
        one = dataclasses.replace(request, dtypes=(of_bundle[1],), backends=(of_bundle[0],)) if of_bundle else request
        cells += make(one, model)
    # One caller is one caller, whatever the mode is called.
    unique = {
        dataclasses.replace(cell, mode=LATENCY) if cell.callers == 1 and LATENCY in request.modes else cell: None
        for cell in cells
    }
    if len(unique) > MAX_CELLS:
        raise SetupError(f"the matrix has {len(unique):,} cells, the limit is {MAX_CELLS:,}; give fewer values")
    order = {model.name: place for place, model in enumerate(request.models)}

    def place(cell: Cell) -> tuple[int, str, int, int, str, int]:
        one = cell.variant
        dtype = request.dtypes.index(one.dtype) if one.dtype in request.dtypes else 0
        return order[one.model], one.backend, dtype, one.cores, cell.mode, cell.batch * max(cell.length, 1)

    return Matrix(request.models, tuple(sorted(unique, key=place)))


def _product(request: MatrixRequest, model: BenchmarkModel) -> Iterator[Cell]:
    lengths = (0,) if model.takes_images else request.lengths
    for backend, dtype, cores, mode, batch, length in itertools.product(
        request.backends, request.dtypes, request.cores, request.modes, request.batches, lengths
    ):
        yield Cell(Variant(model.name, backend, dtype, cores), mode, batch, length)


def _star(request: MatrixRequest, model: BenchmarkModel) -> Iterator[Cell]:
    base_length = 0 if model.takes_images else request.base_length
    lengths = (0,) if model.takes_images else request.lengths
    first_dtype, first_cores = request.dtypes[0], request.cores[0]
    for backend in request.backends:
        base = Variant(model.name, backend, first_dtype, first_cores)
        if LATENCY in request.modes:
            for length in lengths:
                yield Cell(base, LATENCY, request.batches[0], length)
            for batch in request.batches:
                yield Cell(base, LATENCY, batch, base_length)
            for dtype in request.dtypes[1:]:
                for batch in request.throughput_batches:
                    yield Cell(dataclasses.replace(base, dtype=dtype), LATENCY, batch, base_length)
        if THROUGHPUT in request.modes:
            for cores in request.cores:
                for batch in request.throughput_batches:
                    yield Cell(dataclasses.replace(base, cores=cores), THROUGHPUT, batch, base_length)
