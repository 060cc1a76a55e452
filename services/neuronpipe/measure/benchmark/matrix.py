"""The cells of a run: a star around one point, or every combination; and the models that are measured.

The point is the first batch, the base length, the first dtype and the first number of cores. From the point, one value
is varied at a time, as in the published tables; all combinations of the default values would take a day on two CPUs.
Models are of published sizes with random weights, folders of models, or bundles.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.bundles.writing import default_name
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.request import check_range
from neuronpipe.stages.settings import MAX_CORES
from neuronpipe.tasks import TASKS

# Parameters outside of embeddings, which compute with every token, in millions; counted by transformers 5.23. ALBERT's
# layers share parameters, which count as often as they compute.
PUBLISHED_SIZES = {
    "bert-base-uncased": 86,
    "distilbert-base-uncased": 43,
    "roberta-base": 86,
    "albert-base-v2": 85,
    "vit-base-patch16-224": 86,
    "modernbert-base": 111,
    "bert-large-uncased": 303,
}
DEFAULT_MODELS = tuple(PUBLISHED_SIZES)[:6]
IMAGES = ("vit-base-patch16-224",)
# Patches of 16 x 16 pixels of 224 x 224, and the class token.
IMAGE_TOKENS = 197


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """A model. `source`: its folder; empty for random weights of the published size with its name.

    `bundle`: the folder of a compiled bundle, which is measured as it is. `parameters`: the parameters that compute
    with each token, for the estimate.
    """

    name: str
    task: str
    parameters: float
    takes_images: bool = False
    source: str = ""
    bundle: str = ""
    only: tuple[str, str] | None = None
    """Back end and dtype of a bundle."""

    @property
    def is_random(self) -> bool:
        """Whether the model's weights are random."""
        return not self.source and not self.bundle


def published_model(name: str) -> BenchmarkModel:
    """Returns the model of a published size. Raises SetupError if the name is not in PUBLISHED_SIZES."""
    if name not in PUBLISHED_SIZES:
        problem = "no such folder, and no published size of that name"
        raise SetupError(f"--model {name}: {problem}; there are {', '.join(PUBLISHED_SIZES)}")
    takes_images = name in IMAGES
    task = "image_classification" if takes_images else "text_classification"
    return BenchmarkModel(name, task, PUBLISHED_SIZES[name] * 1e6, takes_images)


def find_models(words: Sequence[str], task: str, repository: Path | None) -> list[BenchmarkModel]:
    """Returns the models of `--model` and `--repository`; without either, the default models.

    Raises SetupError if a word is no model, or if two models have the same name.
    """
    models = [_of_folder(Path(word), task) if Path(word).is_dir() else published_model(word) for word in words]
    models += map(_of_bundle, read_repository(repository)) if repository else ()
    models = models or [published_model(name) for name in DEFAULT_MODELS]
    names = [model.name for model in models]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise SetupError(f"--model {duplicate}: two models have this name")
    return models


def _of_folder(folder: Path, task: str) -> BenchmarkModel:
    try:
        config = json.loads((folder / "config.json").read_text())
        architecture = str((config.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"--model {folder}: it has no config.json that can be read") from error
    weights = sum(file.stat().st_size for ending in ("*.safetensors", "*.bin") for file in folder.glob(ending))
    return BenchmarkModel(
        default_name(str(folder)),
        task,
        weights / 4,
        takes_images="ForImageClassification" in architecture or task == "image_classification",
        source=str(folder),
    )


def _of_bundle(bundle: Bundle) -> BenchmarkModel:
    spec = bundle.spec
    if TASKS[spec.task].generates:
        raise SetupError(f"--repository: model {spec.name!r} generates text, which has no cells of this kind")
    artifact = bundle.artifact("")
    size = sum((bundle.folder / name).stat().st_size for name in artifact.files)
    return BenchmarkModel(
        f"{spec.name}/{spec.version}",
        spec.task,
        size / 4,
        takes_images=spec.image is not None,
        bundle=str(bundle.folder),
        only=(artifact.backend, artifact.dtype),
    )


LATENCY, THROUGHPUT = "latency", "throughput"
MODES = (LATENCY, THROUGHPUT)
MAX_BATCH, MAX_LENGTH, MAX_CELLS = 4096, 1 << 17, 10_000


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """The model as a process loads it. `cores`: the number of a device's cores, or of replicas that share the CPUs."""

    model: str
    backend: str
    dtype: str
    cores: int


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A configuration. `length`: tokens of each input, special tokens included; 0 for images, which have one size.

    Mode latency: one caller, who sends a batch when the last batch is answered. Mode throughput: one such caller for
    each core.
    """

    variant: Variant
    mode: str
    batch: int
    length: int

    @property
    def callers(self) -> int:
        """The number of concurrent callers."""
        return 1 if self.mode == LATENCY else self.variant.cores

    @property
    def name(self) -> str:
        """The cell's name in lines of progress and errors."""
        variant = self.variant
        shape = f"{self.batch}x{self.length}" if self.length else f"{self.batch} images"
        cores = f"{variant.cores} core{'s' if variant.cores > 1 else ''}"
        return f"{variant.model}, {variant.backend}, {variant.dtype}, {cores}, {self.mode}, {shape}"


@dataclass(frozen=True, slots=True)
class MatrixRequest:
    """The values to vary. Raises SetupError, which names the option, for a value that is out of range.

    `throughput_batches`: for cells with other dtypes, and for cells of mode throughput.
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
                check_range(option, value, 1, limit)
        if unknown := sorted(set(self.modes) - set(MODES)):
            raise SetupError(f"--modes {unknown[0]}: must be some of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells in the order of measuring: the cells of a variant together, the shortest first."""

    models: Sequence[BenchmarkModel]
    cells: Sequence[Cell] = field(default_factory=tuple)

    @property
    def variants(self) -> dict[Variant, list[Cell]]:
        cells_by_variant: dict[Variant, list[Cell]] = {}
        for cell in self.cells:
            cells_by_variant.setdefault(cell.variant, []).append(cell)
        return cells_by_variant

    def model(self, name: str) -> BenchmarkModel:
        """Returns a model by its name."""
        return next(model for model in self.models if model.name == name)

    def buckets(self, model: str, backend: str, dtype: str) -> tuple[str, ...]:
        """Returns the buckets of a bundle for neuronx, as 8x128; empty for back ends that compute any shape.

        The buckets cover all cells, also cells that are measured already or with other cores: a cell without its own
        bucket would be computed in a larger bucket.
        """
        wanted = (model, backend, dtype)
        shapes = (
            f"{cell.batch}x{cell.length}"
            for cell in self.cells
            if cell.length and (cell.variant.model, cell.variant.backend, cell.variant.dtype) == wanted
        )
        return tuple(dict.fromkeys(shapes)) if backend == "neuronx" else ()


def make_matrix(request: MatrixRequest) -> Matrix:
    """Makes the cells of a request. Raises SetupError if there are too many cells."""
    make = _product if request.is_product else _star
    cells: list[Cell] = []
    for model in request.models:
        model_request = request
        if model.only:
            backend, dtype = model.only
            model_request = replace(request, backends=(backend,), dtypes=(dtype,))
        cells += make(model_request, model)
    # With one caller, both modes are the same measurement.
    unique = {
        replace(cell, mode=LATENCY) if cell.callers == 1 and LATENCY in request.modes else cell: None for cell in cells
    }
    if len(unique) > MAX_CELLS:
        raise SetupError(f"the matrix has {len(unique):,} cells, the limit is {MAX_CELLS:,}; give fewer values")
    order = {model.name: place for place, model in enumerate(request.models)}

    def place(cell: Cell) -> tuple[int, str, int, int, str, int]:
        variant = cell.variant
        dtype = request.dtypes.index(variant.dtype) if variant.dtype in request.dtypes else 0
        return order[variant.model], variant.backend, dtype, variant.cores, cell.mode, cell.batch * max(cell.length, 1)

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
                    yield Cell(replace(base, dtype=dtype), LATENCY, batch, base_length)
        if THROUGHPUT in request.modes:
            for cores in request.cores:
                for batch in request.throughput_batches:
                    yield Cell(replace(base, cores=cores), THROUGHPUT, batch, base_length)
