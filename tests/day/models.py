"""The models of the day: an encoder in int8 with two versions, a reranker in float32, and a small generator."""

import shutil
from pathlib import Path

import torch
import transformers

from demo.model import find_minilm
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import Signed
from tests.models.compiling import compile_model
from tests.models.decoders import CHAT_TEMPLATE, save_decoder
from tests.models.versions import changing_manifest

ENCODER, RERANKER, GENERATOR = "minilm", "reranker", "writer"
_SIGNED = Signed("the day")


def make_models(folder: Path) -> Path:
    """A repository with a registry. Version 2 of the encoder, the canary, has the weights of version 1."""
    repository = folder / "repository"
    source = str(find_minilm())
    compile_model(source, repository, "sentence_embedding", name=ENCODER, dtype="int8")
    torch.manual_seed(0)
    reranker = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    reranker.save_pretrained(folder / "reranker")
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder / "reranker")
    compile_model(folder / "reranker", repository, "rerank", name=RERANKER, dtype="float32")
    generator = save_decoder("llama", folder / "generator", chat_template=CHAT_TEMPLATE)
    compile_model(generator, repository, name=GENERATOR, dtype="")
    canary = shutil.copytree(repository / ENCODER / "1", repository / ENCODER / "2")
    with changing_manifest(canary) as content:
        content["model"]["version"] = 2
    registry = FolderRepository(repository)
    registry.change_registry(lambda now: now.alias(ENCODER, "stable", 1, _SIGNED), _SIGNED)
    return repository


def share_with_canary(repository: Path, percent: int) -> None:
    """Gives version 2 a share of the encoder's requests without a version."""
    shares = {"1": 100 - percent, "2": percent}
    FolderRepository(repository).change_registry(
        lambda now: now.reroute(ENCODER, {version: share for version, share in shares.items() if share}, _SIGNED),
        _SIGNED,
    )
