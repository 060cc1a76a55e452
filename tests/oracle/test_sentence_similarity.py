"""Sentence similarity equals sentence-transformers' cos_sim of its vectors, through four processes."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentence_transformers
from sentence_transformers import SentenceTransformer, util
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neuronpipe.api.v1.tasks_pb2 import SentenceSimilarityInput, TaskInput, Truncation
from tests.oracle.conftest import Suite
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
_WIDTH = 32
_POOLINGS = {"Bert": "mean", "Roberta": "cls", "XLMRoberta": "max"}
_TEXTS = [*PICKED, *generated(41, 36, words=(1, 40)), *generated(42, 4, words=(80, 200))]
_DIMENSIONS = (0, 1, 20)
TASK = ""  # it is found what the models are for
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each family one with another pooling; one has a prompt, another scales its vectors itself."""
    folder = tmp_path_factory.mktemp("embedders")
    for family in FAMILIES:
        base = make_source(folder / "base" / family, family, "Model", max_tokens=_MAX_TOKENS)
        modules = [Transformer(str(base)), Pooling(_WIDTH, _POOLINGS[family])]
        prompt = {"prompts": {"query": "query: "}, "default_prompt_name": "query"} if family == "Roberta" else {}
        whole = SentenceTransformer(
            modules=[*modules, Normalize()] if family == "Bert" else modules, device="cpu", **prompt
        )
        whole.save(str(folder / family))
    return {family: folder / family for family in FAMILIES}


def _cases() -> Iterator[tuple[str, list[str], int]]:
    """Every text as a source, with others drawn from a seed, in all and in fewer dimensions."""
    chosen = random.Random(43)
    for source, dimensions in itertools.product(_TEXTS, _DIMENSIONS):
        yield source, [chosen.choice(_TEXTS) for _ in range(chosen.randint(1, 8))], dimensions


@pytest.mark.parametrize("family", FAMILIES)
async def test_scores_equal_those_of_sentence_transformers(family: str, suite: Suite, sources: dict[str, Path]) -> None:
    compared = suite.comparison(
        f"sentence_similarity-{family}",
        f"util.cos_sim of encode, sentence-transformers {sentence_transformers.__version__}",
    )
    # As here, what looks like a special token in a text is text.
    reference = SentenceTransformer(str(sources[family]), device="cpu", processor_kwargs={"split_special_tokens": True})
    answers = await suite.answers(family, _cases(), lambda case: case[2:], lambda case: _input(*case), at_least=190)
    for (source, texts, dimensions), answer in answers:
        vectors = reference.encode([source, *texts], truncate_dim=dimensions or None)
        expected = util.cos_sim(vectors[:1], vectors[1:])[0].tolist()
        compared.compare((source, texts, dimensions), list(answer.result.sentence_similarity.scores), expected)
    compared.check(at_least=suite.drawn)


def _input(source: str, texts: list[str], dimensions: int) -> TaskInput:
    input = SentenceSimilarityInput(
        source=source, texts=texts, dimensions=dimensions, truncation=Truncation.TRUNCATION_RIGHT
    )
    return TaskInput(sentence_similarity=input)
