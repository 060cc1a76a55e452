"""Sentence embedding equals sentence-transformers' encode, through four processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sentence_transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from demo.model import find_minilm
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, Truncation
from tests.models import architectures
from tests.models.encoder_decoders import save_embedder
from tests.oracle.conftest import Suite
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
_POOLING = dict(zip(FAMILIES, ("cls", "mean", "max"), strict=True))
# As sentence-t5 and GTR: an encoder of T5, and a layer behind its pooling.
_MODELS = ("minilm", *FAMILIES, "T5")
_TRUNCATIONS = {"right": Truncation.TRUNCATION_RIGHT, "left": Truncation.TRUNCATION_LEFT}
_TEXTS = (*PICKED, *generated(41, 30, words=(1, 30)), *generated(42, 8, words=(60, 400)))
# None: all.
_DIMENSIONS = (None, 1, 20)
TASK = "sentence_embedding"
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("embedders")
    base = architectures.make_source(folder / "T5-base", "T5", TASK)
    made = {"minilm": find_minilm(), "T5": save_embedder(folder / "T5", base)}
    for family, pooling in _POOLING.items():
        base = make_source(folder / f"{family}-base", family, "Model", max_tokens=_MAX_TOKENS)
        SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, pooling)], device="cpu").save(
            str(folder / family)
        )
        made[family] = folder / family
    return made


def _cases() -> Iterator[tuple[str, int | None, bool, str]]:
    """All texts with all numbers of dimensions; whether the vector is scaled, and the side of truncation, in turns."""
    turns = itertools.cycle(itertools.product((True, False), _TRUNCATIONS))
    for text, dimensions in itertools.product(_TEXTS, _DIMENSIONS):
        yield text, dimensions, *next(turns)


@pytest.mark.parametrize("model", _MODELS)
async def test_vectors_equal_those_of_sentence_transformers(model: str, suite: Suite, sources: dict[str, Path]) -> None:
    compared = suite.comparison(
        f"sentence_embedding-{model}", f"SentenceTransformer.encode {sentence_transformers.__version__}"
    )
    reference = _reference(sources[model])
    answers = await suite.answers(model, _cases(), lambda case: case[1:], lambda case: _input(*case), at_least=180)
    for case, answer in answers:
        text, dimensions, is_scaled, side = case
        reference.tokenizer.truncation_side = side
        expected = reference.encode(text, normalize_embeddings=is_scaled, truncate_dim=dimensions)
        ours = np.array(answer.result.sentence_embedding.embedding, np.float32)
        compared.compare(case, ours.tolist(), expected.tolist())
    compared.check(at_least=suite.drawn)


def _reference(source: Path) -> SentenceTransformer:
    model = SentenceTransformer(str(source), device="cpu")
    # Some models scale their vectors themselves; here that is the caller's choice. As here, what looks like a special
    # token in a text is text.
    modules = [module for module in model if not isinstance(module, Normalize)]
    reference = SentenceTransformer(modules=modules, device="cpu")
    reference.tokenizer.split_special_tokens = True
    return reference


def _input(text: str, dimensions: int | None, is_scaled: bool, side: str) -> TaskInput:
    input = SentenceEmbeddingInput(
        text=text, dimensions=dimensions or 0, skip_normalize=not is_scaled, truncation=_TRUNCATIONS[side]
    )
    return TaskInput(sentence_embedding=input)
