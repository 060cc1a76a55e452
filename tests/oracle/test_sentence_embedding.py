"""Sentence embedding equals sentence-transformers' encode, through four processes."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Set
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import sentence_transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from demo.model import find_minilm
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, Truncation
from tests.oracle.comparison import Comparison
from tests.oracle.serving import Served, serving
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated
from tests.suite.sampling import Sample

_MAX_TOKENS = 64
_POOLING = dict(zip(FAMILIES, ("cls", "mean", "max"), strict=True))
_MODELS = ("minilm", *FAMILIES)
_TRUNCATIONS = {"right": Truncation.TRUNCATION_RIGHT, "left": Truncation.TRUNCATION_LEFT}
_TEXTS = (*PICKED, *generated(41, 30, words=(1, 30)), *generated(42, 8, words=(60, 400)))
# None: all.
_DIMENSIONS = (None, 1, 20)
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def embedder_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("embedders")
    sources = {"minilm": find_minilm()}
    for family, pooling in _POOLING.items():
        base = make_source(folder / f"{family}-base", family, "Model", max_tokens=_MAX_TOKENS)
        SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, pooling)], device="cpu").save(
            str(folder / family)
        )
        sources[family] = folder / family
    return sources


@pytest_asyncio.fixture(scope="module")
async def served(
    asked: Set[str], embedder_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    sources = {name: ("sentence_embedding", source) for name, source in embedder_sources.items() if name in asked}
    async with serving(tmp_path_factory.mktemp("repository"), sources) as running:
        yield running


def _cases() -> Iterator[tuple[str, int | None, bool, str]]:
    """All texts with all numbers of dimensions; whether the vector is scaled, and the side of truncation, in turns."""
    turns = itertools.cycle(itertools.product((True, False), _TRUNCATIONS))
    for text, dimensions in itertools.product(_TEXTS, _DIMENSIONS):
        yield text, dimensions, *next(turns)


@pytest.mark.parametrize("model", _MODELS)
async def test_vectors_equal_those_of_sentence_transformers(
    model: str,
    served: Served,
    embedder_sources: dict[str, Path],
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
) -> None:
    compared = comparison(
        f"sentence_embedding-{model}", f"SentenceTransformer.encode {sentence_transformers.__version__}"
    )
    reference = _reference(embedder_sources[model])
    cases = sample.draw(_cases(), lambda case: case[1:], at_least=180)
    outcomes = await served.infer_all(model, [_input(*case) for case in cases])
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.HasField("response"), (case, outcome.error.message)
        text, dimensions, is_scaled, side = case
        reference.tokenizer.truncation_side = side
        expected = reference.encode(text, normalize_embeddings=is_scaled, truncate_dim=dimensions)
        ours = np.array(outcome.response.result.sentence_embedding.embedding, np.float32)
        compared.compare(case, ours.tolist(), expected.tolist())
    compared.check(at_least=len(cases))


def _reference(source: Path) -> SentenceTransformer:
    model = SentenceTransformer(str(source), device="cpu")
    # MiniLM scales its vectors itself; here that is the caller's choice. As here, what looks like a special token in a
    # text is text.
    reference = SentenceTransformer(modules=list(model)[:2], device="cpu")
    reference.tokenizer.split_special_tokens = True
    return reference


def _input(text: str, dimensions: int | None, is_scaled: bool, side: str) -> TaskInput:
    input = SentenceEmbeddingInput(
        text=text, dimensions=dimensions or 0, skip_normalize=not is_scaled, truncation=_TRUNCATIONS[side]
    )
    return TaskInput(sentence_embedding=input)
