"""What is measured: models of published sizes with random weights, folders of models, and bundles."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.repository import Bundle, default_name, read_repository
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS

# Parameters outside of embeddings, which compute with every token, in millions; counted by transformers 5.23.
# ALBERT's layers share theirs: as many as are computed.
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
# Patches of 16 x 16 pixels of 224 x 224, and the class.
IMAGE_TOKENS = 197


@dataclass(frozen=True, slots=True)
class BenchmarkModel:
    """One model. `source`: its folder; empty for random weights of the published size that has its name.

    `bundle`: the folder of a compiled one, which is measured as it is. `parameters`: those that compute with each
    token, for the estimate.
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
        """Whether its weights are random."""
        return not self.source and not self.bundle


def published_model(name: str) -> BenchmarkModel:
    """Raises SetupError for a name that is none of PUBLISHED_SIZES."""
    if name not in PUBLISHED_SIZES:
        raise SetupError(
            f"--model {name}: no such folder, and no published size of that name; there are "
            f"{', '.join(PUBLISHED_SIZES)}"
        )
    takes_images = name in IMAGES
    task = "image_classification" if takes_images else "text_classification"
    return BenchmarkModel(name, task, PUBLISHED_SIZES[name] * 1e6, takes_images)


def find_models(words: Sequence[str], task: str, repository: Path | None) -> list[BenchmarkModel]:
    """The models of `--model` and `--repository`; without either, those that are published most.

    Raises SetupError for what is no model, or two of the same name.
    """
    models = [_of_folder(Path(word), task) if Path(word).is_dir() else published_model(word) for word in words]
    if repository:
        models += [_of_bundle(bundle) for bundle in read_repository(repository)]
    models = models or [published_model(name) for name in DEFAULT_MODELS]
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SetupError(f"--model {twice}: two models have this name")
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
