"""Feature extraction equals FeatureExtractionPipeline, through four processes."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    FeatureExtractionResult,
    FeaturePooling,
    FeatureType,
    TaskInput,
    Truncation,
)
from tests.oracle.comparison import pipeline_of
from tests.oracle.conftest import Suite
from tests.oracle.serving import Served
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated

_MAX_TOKENS = 64
_POOLINGS: dict[str, tuple["FeaturePooling.ValueType", Callable[[Any], Any]]] = {
    "none": (FeaturePooling.FEATURE_POOLING_UNSPECIFIED, lambda state: state),
    "cls": (FeaturePooling.FEATURE_POOLING_CLS, lambda state: state[0]),
    "mean": (FeaturePooling.FEATURE_POOLING_MEAN, lambda state: state.mean(axis=0)),
}
_TEXTS = [*PICKED, *generated(51, 20, words=(1, 40)), *generated(52, 4, words=(80, 200))]
_PAIRS = [(text, pair) for text, pair in zip(_TEXTS, reversed(_TEXTS), strict=True)]
# Of numbers up to 5, half of the distance between two of float16.
_FLOAT16_TOLERANCE = 2**-9
TASK = ""  # it is found what the models are for
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: make_source(folder / family, family, "Model", max_tokens=_MAX_TOKENS) for family in FAMILIES}


def _cases() -> Iterator[tuple[str, str, str]]:
    """Every text and every pair with every pooling."""
    for (text, pair), pooling in itertools.product([*((text, "") for text in _TEXTS), *_PAIRS], _POOLINGS):
        yield text, pair, pooling


def _options(case: tuple[str, str, str]) -> tuple[bool, str]:
    _, pair, pooling = case
    return bool(pair), pooling


def _reference(source: Path) -> Callable[[str, str], Any]:
    """float32 [tokens, width] of a text or a pair."""
    pipeline = pipeline_of("feature-extraction", source)

    def state(text: str, pair: str) -> Any:
        second = {"text_pair": pair} if pair else {}
        return pipeline(text, truncation=True, tokenize_kwargs=second, return_tensors=True)[0].numpy()

    return state


@pytest.mark.parametrize("family", FAMILIES)
async def test_vectors_equal_those_of_transformers(family: str, suite: Suite, sources: dict[str, Path]) -> None:
    version = f"transformers {transformers.__version__}"
    compared = suite.comparison(f"feature_extraction-{family}", f"FeatureExtractionPipeline, {version}")
    state = _reference(sources[family])
    answers = await suite.answers(family, _cases(), _options, lambda case: _input(*case), at_least=280)
    for (text, pair, pooling), answer in answers:
        ours = _vectors(answer.result.feature_extraction).tolist()
        compared.compare((text, pair, pooling), ours, _POOLINGS[pooling][1](state(text, pair)).tolist())
    compared.check(at_least=suite.drawn)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "number", [FeatureType.FEATURE_TYPE_FLOAT16, FeatureType.FEATURE_TYPE_INT8], ids=["float16", "int8"]
)
async def test_shorter_numbers_are_as_near_as_they_can_be(
    family: str, number: "FeatureType.ValueType", suite: Suite, sources: dict[str, Path]
) -> None:
    is_int8 = number == FeatureType.FEATURE_TYPE_INT8
    compared = suite.comparison(
        f"feature_extraction-{family}-{'int8' if is_int8 else 'float16'}", "FeatureExtractionPipeline, rounded"
    )
    state = _reference(sources[family])
    cases = list(_cases())[::5]
    answers = await suite.answers(family, cases, _options, lambda case: _input(*case, number), at_least=50)
    for (text, pair, pooling), answer in answers:
        result = answer.result.feature_extraction
        tolerance = max(result.scales) / 2 + 5e-5 if is_int8 else _FLOAT16_TOLERANCE
        expected = _POOLINGS[pooling][1](state(text, pair))
        compared.compare((text, pair, pooling), _vectors(result).tolist(), expected.tolist(), tolerance=tolerance)
    compared.check(at_least=suite.drawn)


@pytest.mark.parametrize("family", FAMILIES)
async def test_chunks_have_the_means_of_their_tokens_in_the_whole_text(
    family: str, suite: Suite, sources: dict[str, Path]
) -> None:
    compared = suite.comparison(f"feature_extraction-{family}-chunks", "means of FeatureExtractionPipeline's vectors")
    state = _reference(sources[family])
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources[family], split_special_tokens=True)
    texts = [text for text in _TEXTS if len(tokenizer.tokenize(text)) in range(8, _MAX_TOKENS - 2)]
    for text in texts:
        vectors = state(text, "")
        of_text = np.flatnonzero(np.array(tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]) == 0)
        found = await suite.served.client.embed_chunks(family, text, chunk_tokens=5)
        expected = [vectors[of_text[begin : begin + 5]].mean(axis=0) for begin in range(0, len(of_text), 5)]
        ours = [chunk.embedding.tolist() for chunk in found]
        compared.compare((text, 5), ours, np.stack(expected).tolist())
        places = np.array(tokenizer(text, return_offsets_mapping=True)["offset_mapping"])[of_text]
        overlap = any(chunk.end > following.start for chunk, following in itertools.pairwise(found))
        if overlap or (places[:, 0] == places[:, 1]).any():
            continue  # a space is a token without a character, or one character is several tokens, of two chunks
        # The parts that the server names, sent as the caller's own, have the same tokens and so the same vectors.
        spans = [(chunk.start, chunk.end) for chunk in found]
        again = await suite.served.client.embed_chunks(family, text, chunks=spans)
        assert [(chunk.start, chunk.end) for chunk in again] == spans
        compared.compare((text, "spans"), [chunk.embedding.tolist() for chunk in again], np.stack(expected).tolist())
    compared.check(at_least=20)


@pytest.mark.parametrize("family", ["Bert"])
async def test_the_client_gives_the_array_that_the_bytes_are(family: str, served: Served) -> None:
    (outcome,) = await served.infer_all(family, [_input("one two", "three", "none", FeatureType.FEATURE_TYPE_INT8)])
    array = await served.client.extract_features(family, "one two", "three", type=FeatureType.FEATURE_TYPE_INT8)
    np.testing.assert_array_equal(array, _vectors(outcome.response.result.feature_extraction))


def _input(
    text: str, pair: str, pooling: str, number: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_UNSPECIFIED
) -> TaskInput:
    input = FeatureExtractionInput(
        text=text, text_pair=pair, pooling=_POOLINGS[pooling][0], type=number, truncation=Truncation.TRUNCATION_RIGHT
    )
    return TaskInput(feature_extraction=input)


def _vectors(result: FeatureExtractionResult) -> Any:
    """The vectors as a caller reads them."""
    if result.type == FeatureType.FEATURE_TYPE_INT8:
        scales = np.array(result.scales, np.float32)
        numbers = np.frombuffer(result.data, np.int8).reshape(len(scales), -1) * scales[:, np.newaxis]
    else:
        numbers = np.frombuffer(
            result.data, "<f2" if result.type == FeatureType.FEATURE_TYPE_FLOAT16 else "<f4"
        ).astype(np.float32)
    return numbers.reshape(tuple(result.shape))
