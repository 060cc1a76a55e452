"""Fill-mask equals FillMaskPipeline, through four processes."""

import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.api.v1.tasks_pb2 import FillMaskInput, TaskInput, Truncation
from tests.oracle.conftest import Suite
from tests.oracle.small_models import FAMILIES, make_source
from tests.oracle.texts import PICKED, generated
from tests.suite.sampling import Sample

_MAX_TOKENS = 192
_LONG = generated(23, 6, words=(150, 250))
# Of probabilities the logarithms are compared, since most are about one in a thousand: the differences are those of
# logits of up to 30.
_TOLERANCE = 3e-4
TASK = "fill_mask"
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fillers")
    return {family: make_source(folder / family, family, "ForMaskedLM", max_tokens=_MAX_TOKENS) for family in FAMILIES}


def _cases(tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Texts with one to four masks in place of words, at their ends, or inside of words; options in turns."""
    chosen, mask = random.Random(21), tokenizer.mask_token
    vocabulary = sorted(token for token in tokenizer.get_vocab() if token not in tokenizer.all_special_tokens)
    # What results show of a token (token_str), such as " the", where that is read as one token.
    shown = [tokenizer.decode(tokenizer.convert_tokens_to_ids([token])) for token in vocabulary]
    shown = [word for word in shown if len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1]
    # What spells another special token: without its mask, transformers cannot be asked to take it for text.
    texts = [
        text
        for text in (*PICKED, *generated(22, 60, words=(1, 20)))
        if not any(token in text for token in tokenizer.all_special_tokens)
    ]
    for number, text in enumerate(texts * 2):
        words = text.split(" ")
        for _ in range(number % 4 + 1):
            place = chosen.randrange(len(words))
            words[place] = words[place][:3] + mask if number % 7 == 0 else mask
        options: dict[str, Any] = [{}, {"top_k": 1}, {"top_k": 20}][number % 3]
        if number % 5 == 0:
            named = shown if number % 2 else vocabulary
            options = {**options, "targets": chosen.sample(named, chosen.randint(1, 8))}
        yield " ".join(words), options
    for text in _LONG:  # cut at the end, the mask at the beginning
        yield f"The {mask} {text}", {"tokenizer_kwargs": {"truncation": True}}


def _options(case: tuple[str, dict[str, Any]]) -> Mapping[str, Any]:
    return {name: value for name, value in case[1].items() if name != "targets"} | {"has targets": "targets" in case[1]}


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_those_of_transformers(
    family: str, suite: Suite, sources: dict[str, Path], sample: Sample
) -> None:
    compared = suite.comparison(
        f"fill_mask-{family}", f"FillMaskPipeline, transformers {transformers.__version__}; logarithms of scores"
    )
    pipeline = transformers.pipeline("fill-mask", model=str(sources[family]), device="cpu")
    cases = _cases(pipeline.tokenizer)
    answers = await suite.answers(family, cases, _options, lambda case: _input(case[0], **case[1]), at_least=150)
    for (text, options), answer in answers:
        masks = answer.result.fill_mask.masks
        reference = pipeline(text, **options)
        expected = reference if isinstance(reference[0], list) else [reference]
        for mask, candidates in zip(masks, expected, strict=True):
            assert text[mask.start : mask.end].strip() == pipeline.tokenizer.mask_token, text
            ours = [_scored(token.token, token.token_id, token.score) for token in mask.tokens]
            theirs = [_scored(token["token_str"], token["token"], token["score"]) for token in candidates]
            compared.compare_ranked((text, options), ours, theirs, tolerance=_TOLERANCE)
    compared.check(at_least=300 if sample.is_whole else suite.drawn)


def _scored(token: str, token_id: int, score: float) -> dict[str, Any]:
    return {"token": token, "token_id": token_id, "score": math.log(score)}


def _input(text: str, *, tokenizer_kwargs: Any = None, **options: Any) -> TaskInput:
    truncation = Truncation.TRUNCATION_RIGHT if tokenizer_kwargs else Truncation.TRUNCATION_UNSPECIFIED
    return TaskInput(fill_mask=FillMaskInput(text=text, truncation=truncation, **options))
