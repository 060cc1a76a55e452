"""Text classification by every architecture equals TextClassificationPipeline, through four processes.

The compiler compares with the module that it made itself; what it changed of a model, or left out of its inputs, shows
here.
"""

from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path

import pytest
import pytest_asyncio
import transformers

from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TextClassificationInput, Truncation
from tests.models.architectures import ENCODER_DECODERS, ENCODERS, make_source
from tests.oracle.comparison import Comparison, pipeline_of, scored
from tests.oracle.serving import Served, serving
from tests.oracle.texts import PICKED, generated
from tests.suite.sampling import Sample

pytestmark = pytest.mark.long

# Those that transformers does not have are compared with their published code, in test_own_code.py.
_ARCHITECTURES = [name for name, architecture in (ENCODERS | ENCODER_DECODERS).items() if architecture.publish is None]
# Not those with the names of special tokens: the tokenizers' suites say what becomes of them.
_TEXTS = [text for text in PICKED if "[CLS]" not in text] + [*generated(41, 16), *generated(42, 4, words=(60, 150))]
# Logits of up to 50, where sums of float32 in another order differ by more than scores do.
_TOLERANCE = 2e-4


def _model(name: str) -> str:
    """The name of an architecture's model, which has no spaces."""
    return name.replace(" ", "-")


@pytest.fixture(scope="module")
def architecture_sources(asked: Set[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("architectures")
    return {name: make_source(folder / name, name, "text_classification") for name in asked}


@pytest_asyncio.fixture(scope="module")
async def served(
    architecture_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    sources = {_model(name): ("text_classification", source) for name, source in architecture_sources.items()}
    async with serving(tmp_path_factory.mktemp("repository"), sources) as running:
        yield running


@pytest.mark.parametrize("name", _ARCHITECTURES)
async def test_logits_equal_those_of_transformers(
    name: str,
    served: Served,
    architecture_sources: dict[str, Path],
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
) -> None:
    compared = comparison(
        f"architecture-{name}", f"TextClassificationPipeline, transformers {transformers.__version__}"
    )
    pipeline = pipeline_of("text-classification", architecture_sources[name])
    pairs = [(text, pair) for number, text in enumerate(_TEXTS) for pair in ("", _TEXTS[-number - 1])]
    cases = sample.draw(pairs, lambda case: [bool(case[1])], at_least=80)
    outcomes = await served.infer_all(_model(name), [_input(*case) for case in cases])
    for (text, pair), outcome in zip(cases, outcomes, strict=True):
        assert outcome.HasField("response"), (text, pair, outcome.error.message)
        (expected,) = pipeline(
            [{"text": text, "text_pair": pair or None}], function_to_apply="none", top_k=None, truncation=True
        )
        labels = outcome.response.result.text_classification.labels
        compared.compare_ranked((text, pair), scored(labels), expected, tolerance=_TOLERANCE)
    compared.check(at_least=len(cases))


def _input(text: str, pair: str) -> TaskInput:
    function, right = ScoreFunction.SCORE_FUNCTION_NONE, Truncation.TRUNCATION_RIGHT
    input = TextClassificationInput(text=text, text_pair=pair, top_k=3, function=function, truncation=right)
    return TaskInput(text_classification=input)
