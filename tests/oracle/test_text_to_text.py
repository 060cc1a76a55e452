"""Summaries and translations equal transformers' `generate` in float32, through four processes, with texts that come
and leave while others are generated.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, GeneratedText, Truncation
from neuronpipe.client import AsyncClient
from neuronpipe.client.task_call import generation_request
from neuronpipe.core.errors import InvalidInput
from tests.models.encoder_decoders import TOKENS, save_encoder_decoder
from tests.models.tokenizers import marian, mbart, nllb
from tests.oracle.comparison import Comparison
from tests.oracle.generation import REFERENCE, Case, ended, options_of, read_a_chunk_and_leave, said
from tests.oracle.serving import Served, serving, serving_texts
from tests.oracle.texts import PICKED, generated
from tests.oracle.transformers4 import ask
from tests.suite.constants import constants
from tests.suite.sampling import Sample

pytestmark = pytest.mark.long

_TASKS = {
    "bart": "summarization",
    "pegasus": "summarization",
    "marian": "translation",
    "mbart": "translation",
    "t5": "summarization",
    "t5-gated": "translation",
    "mt5": "summarization",
}
# A cache of about 20 blocks is less than the texts need together: some are preempted.
_LIMITS = ("--max-batch-size", "12", "--kv-cache-bytes", str(700 << 10))
_STEP_TOKENS = 48
_SMALL: dict[str, Any] = {
    "stage_options": {"neuron-executor": _LIMITS},
    "environment": constants(step_tokens=_STEP_TOKENS),
}
_AT_ONCE = 24
# Sums of the logarithms of up to 50 probabilities, in float32. With the random weights of gated T5s they are of large
# logits.
_SCORES = dict.fromkeys(_TASKS, 1e-4) | dict.fromkeys(("t5-gated", "mt5"), 1e-3)
# Of float32, and how often weights are moved by it. Of 16, 6 and more decided otherwise where two beams were equal.
_ROUNDING, _ROUNDED = 1e-7, 16
_RIGHT = Truncation.TRUNCATION_RIGHT
_EARLY, _NEVER = EarlyStopping.EARLY_STOPPING_TRUE, EarlyStopping.EARLY_STOPPING_NEVER
_MEANINGS = {0: False, _EARLY: True, _NEVER: "never"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_encoder_decoder(family, folder / family) for family in _TASKS}


@pytest_asyncio.fixture(scope="module")
async def served(
    asked: Set[str], sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    named = {family: (_TASKS[family], source) for family, source in sources.items() if family in asked}
    async with serving(tmp_path_factory.mktemp("repository"), named, **_SMALL) as running:
        yield running


def _cases() -> Iterator[Case]:
    """Texts of up to 160 tokens and more, and options in turns."""
    chosen = random.Random(41)
    texts = [*PICKED, *generated(42, 70, words=(1, 40)), *generated(43, 20, words=(60, 200))]
    for number, text in enumerate(texts):
        options: dict[str, Any] = {"max_new_tokens": chosen.choice((1, 8, 32, 50))}
        options |= (
            {},
            {"repetition_penalty": 1.3},
            {"min_new_tokens": min(8, options["max_new_tokens"]), "no_repeat_ngram_size": 3},
            {"stop_token_ids": chosen.sample(range(5, 1200), 40)},
            {"no_repeat_ngram_size": 1, "forced_bos_token_id": chosen.randrange(5, 1200)},
            {"forced_eos_token_id": 2, "bad_words_ids": [[chosen.randrange(5, 1200)] for _ in range(60)]},
            {"no_repeat_ngram_size": 2, "bad_words_ids": [[chosen.randrange(5, 1200), 7]]},
            {"num_beams": 4, "num_return_sequences": 4},
            {"num_beams": 3, "length_penalty": 2.0, "early_stopping": _EARLY, "no_repeat_ngram_size": 3},
            {"num_beams": 2, "length_penalty": -1.0, "early_stopping": _NEVER, "num_return_sequences": 2},
            {
                "num_beams": 4,
                "length_penalty": 0.8,
                "early_stopping": _NEVER,
                "forced_bos_token_id": 0,
                "forced_eos_token_id": 2,
                "min_new_tokens": min(6, options["max_new_tokens"]),
            },
            {
                "num_beams": 5,
                "repetition_penalty": 1.2,
                "stop_token_ids": chosen.sample(range(5, 1200), 10),
                "num_return_sequences": 3,
                "top_logprobs": 2,
            },
            {"num_beams": 4, "bad_words_ids": [[chosen.randrange(5, 1200)] for _ in range(60)]},
            {"num_beams": 4, "early_stopping": _EARLY, "stop_token_ids": chosen.sample(range(5, 1200), 60)},
        )[number % 14]
        yield text, options


@pytest.mark.parametrize("family", _TASKS)
async def test_texts_equal_those_of_generate(
    family: str, served: Served, sources: dict[str, Path], sample: Sample, comparison: Callable[[str, str], Comparison]
) -> None:
    compared = comparison(f"{_TASKS[family]}-{family}", REFERENCE)
    cases = sample.draw(_cases(), options_of, at_least=100)
    await _compare(family, served.client, _Reference(sources[family]), cases, compared)
    compared.check(at_least=100 if sample.is_whole else len(cases))


@pytest.mark.parametrize(
    ("backend", "family"),
    [("torch", "bart"), ("torch", "t5"), ("neuronx", "bart"), ("neuronx", "marian"), ("neuronx", "t5")],
)
async def test_texts_of_other_back_ends_equal_those_of_generate(
    backend: str,
    family: str,
    request: pytest.FixtureRequest,
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
    tmp_path: Path,
) -> None:
    """Neuron is its contract double. Nine slots are less than the texts need, some with 5 beams and a source."""
    compared = comparison(f"{_TASKS[family]}-{family}-{backend}", REFERENCE)
    cases, source = sample.draw(_cases(), options_of, at_least=40), save_encoder_decoder(family, tmp_path / "source")
    named = {family: (_TASKS[family], source)}
    machine = constants(
        request.getfixturevalue("neuron_double") if backend == "neuronx" else {}, step_tokens=_STEP_TOKENS
    )
    async with serving_texts(backend, tmp_path, named, f"9x{TOKENS}", _LIMITS, machine) as served:
        await _compare(family, served.client, _Reference(source), cases, compared)
    compared.check(at_least=100 if sample.is_whole else len(cases))


async def test_the_language_of_a_translation_is_named_before_its_text(
    sample: Sample, comparison: Callable[[str, str], Comparison], tmp_path: Path
) -> None:
    """As Marian's models of several languages have it, by the caller or by us."""
    tokenizer = marian(max_tokens=TOKENS, languages=("fra", "por_Latn"))
    source = save_encoder_decoder("marian", tmp_path / "source", tokenizer=tokenizer)
    compared = comparison("translation-marian-languages", REFERENCE)
    texts = sample.draw(generated(47, 60, words=(1, 30)), lambda text: {}, at_least=40)
    languages = dict(zip(texts, itertools.cycle(("fra", "por_Latn")), strict=False))
    async with serving(tmp_path / "repository", {"marian": ("translation", source)}) as served:
        reference, client = _Reference(source), served.client
        for text, language in languages.items():
            named = f">>{language}<< {text}"
            wanted = reference.generate(named, max_new_tokens=12)[0]["token_ids"]
            ours = await client.translate("marian", text, target_language=language, num_beams=1, max_new_tokens=12)
            compared.compare((text, language), list(ours.token_ids), wanted)
            ours = await client.translate("marian", named, num_beams=1, max_new_tokens=12)
            compared.compare((named, ""), list(ours.token_ids), wanted)
        with pytest.raises(InvalidInput, match="target_language: is missing; model 'marian' knows: fra, por_Latn"):
            await client.translate("marian", texts[0])
    compared.check(at_least=2 * len(texts))


@pytest.mark.parametrize(
    ("family", "make_tokenizer", "english", "german", "french", "known"),
    [
        ("mbart", mbart, "en_XX", "de_DE", "fr_XX", "ar_AR, cs_CZ, de_DE"),
        ("nllb", nllb, "eng_Latn", "deu_Latn", "fra_Latn", "ace_Arab, ace_Latn, acm_Arab"),
    ],
)
async def test_the_languages_of_a_translation_are_the_tokens_that_the_model_has_for_them(
    family: str,
    make_tokenizer: Callable[..., Any],
    english: str,
    german: str,
    french: str,
    known: str,
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
    tmp_path: Path,
) -> None:
    source = save_encoder_decoder(family, tmp_path / "source", tokenizer=make_tokenizer(max_tokens=TOKENS))
    compared = comparison(f"translation-{family}-languages", REFERENCE)
    texts = sample.draw(generated(48, 60, words=(1, 30)), lambda text: {}, at_least=40)
    pairs = itertools.cycle(((english, german), (french, german), (german, english)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    async with serving(tmp_path / "repository", {family: ("translation", source)}) as served:
        reference, client = _Reference(source), served.client
        for text, (language, target) in zip(texts, pairs, strict=False):
            reference.tokenizer.src_lang = language
            forced = tokenizer.convert_tokens_to_ids(target)
            (wanted,) = reference.generate(text, max_new_tokens=12, forced_bos_token_id=forced)
            ours = await client.translate(
                family, text, source_language=language, target_language=target, num_beams=1, max_new_tokens=12
            )
            compared.compare((text, language, target), list(ours.token_ids), wanted["token_ids"])
        with pytest.raises(InvalidInput, match=f"target_language: is missing; model '{family}' knows: {known}"):
            await client.translate(family, texts[0])
    compared.check(at_least=len(texts))


async def _compare(
    family: str,
    client: AsyncClient,
    reference: "_Reference",
    cases: Sequence[Case],
    compared: Comparison,
) -> None:
    turns, chance = asyncio.Semaphore(_AT_ONCE), random.Random(44)

    async def ask(number: int, text: str, options: dict[str, Any]) -> Sequence[GeneratedText]:
        async with turns:
            await asyncio.sleep(chance.random() / 50)
            if number % 4 == 0:
                await read_a_chunk_and_leave(client.stream(_request(family, text, max_new_tokens=60)))
            result = (await client.infer(_request(family, text, **options))).result
            sequences: Sequence[GeneratedText] = getattr(result, _TASKS[family]).sequences
            return sequences

    found = await asyncio.gather(*(ask(number, *case) for number, case in enumerate(cases)))
    for (text, options), ours in zip(cases, found, strict=True):
        expected = reference.generate(text, **options)
        # A score is a sum over a power of the text's length, and so is its difference, which grows with the sum.
        power, scored = options.get("length_penalty", 1.0), [sequence for sequence in expected if "score" in sequence]
        sizes = [max(len(sequence["token_ids"]) ** -power, abs(sequence["score"])) for sequence in scored]
        compared.compare(
            (text, options), [*map(said, ours)], expected, tolerance=_SCORES[family] * max(1.0, *sizes, 0.0)
        )
        assert all(len(sequence.logprobs) == ("top_logprobs" in options) * len(sequence.token_ids) for sequence in ours)


def _request(family: str, text: str, **options: Any) -> InferRequest:
    given = {"num_beams": 1, **options}
    return generation_request(_TASKS[family], family, {"text": text}, given, truncation=_RIGHT)


_T5_SETTINGS = {"num_beams": 4, "early_stopping": True, "max_length": 30, "min_length": 9, "no_repeat_ngram_size": 2}
_T5_TASKS: dict[str, dict[str, Any]] = {
    "summarization": {**_T5_SETTINGS, "length_penalty": 2.0, "prefix": "summarize: "},
    "translation_en_to_de": {**_T5_SETTINGS, "prefix": "translate English to German: "},
    "translation_en_to_fr": {**_T5_SETTINGS, "prefix": "translate English to French: "},
}


@pytest.mark.parametrize(("family", "asked_for"), [("t5", "summarization"), ("t5-gated", "translation_en_to_de")])
async def test_texts_equal_those_of_the_pipeline_of_a_task(
    family: str, asked_for: str, sample: Sample, comparison: Callable[[str, str], Comparison], tmp_path: Path
) -> None:
    """T5's config.json has settings and a prefix for each task."""
    save_encoder_decoder(family, tmp_path / "source", task_specific_params=_T5_TASKS, max_length=50)
    cases = _turns(sample, generated(46, 60, words=(5, 60)), {}, {"num_beams": 1}, {"max_new_tokens": 20})
    await _compare_with_pipeline(family, asked_for, cases, comparison, tmp_path, **_T5_TASKS[asked_for])


@pytest.mark.parametrize("family", ["bart", "marian", "t5"])
async def test_texts_equal_those_of_the_pipeline_with_its_own_defaults(
    family: str, sample: Sample, comparison: Callable[[str, str], Comparison], tmp_path: Path
) -> None:
    """The pipelines of transformers 4: 4 beams where the model says nothing, and its lengths count the first token."""
    own: dict[str, Any] = {"max_length": 36, "min_length": 12, "no_repeat_ngram_size": 3}
    if family == "bart":
        # The pipelines take 4 beams, whatever the model says; we take the model's, as generate does.
        own |= {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}
    save_encoder_decoder(family, tmp_path / "source", forced_bos_token_id=0, forced_eos_token_id=2, **own)
    two: dict[str, Any] = {"num_beams": 2, "length_penalty": 0.5}
    cases = _turns(sample, generated(45, 60, words=(5, 90)), {}, {"num_beams": 1}, two, {"max_new_tokens": 20})
    await _compare_with_pipeline(family, _TASKS[family], cases, comparison, tmp_path)


def _turns(sample: Sample, texts: Sequence[str], *given: dict[str, Any]) -> list[dict[str, Any]]:
    """Draws of texts with options in turns."""
    every = [{"text": text, "options": options} for text, options in zip(texts, itertools.cycle(given), strict=False)]
    return sample.draw(every, lambda case: case["options"], at_least=60)


async def _compare_with_pipeline(
    family: str,
    asked_for: str,
    cases: Sequence[dict[str, Any]],
    comparison: Callable[[str, str], Comparison],
    folder: Path,
    *,
    prefix: str = "",
    **settings: Any,
) -> None:
    """Compares texts of the model in `folder/source` with those of transformers' pipeline of a task, which has
    settings and a prefix.
    """
    source, task = folder / "source", asked_for.split("_", maxsplit=1)[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    version, answers = ask({family: (source, tokenizer)}, cases, folder, asked_for)
    compared = comparison(f"{asked_for}-{family}-pipeline", f"pipeline({asked_for!r}), transformers {version}")
    async with serving(folder / "repository", {family: (task, source)}) as served:
        method: Callable[..., Any] = served.client.summarize if task == "summarization" else served.client.translate
        language = {"target_language": "de"} if asked_for == "translation_en_to_de" else {}
        asked = (method(family, case["text"], truncation=_RIGHT, **language, **case["options"]) for case in cases)
        found = await asyncio.gather(*asked)
    for case, text, (expected,) in zip(cases, found, answers[family], strict=True):
        (wanted,) = expected.values()
        options = settings | case["options"]
        if text.text != wanted and _are_as_good(source, prefix + case["text"], options, text.text, wanted):
            continue
        compared.compare((case["text"], case["options"]), {"text": text.text}, {"text": wanted})
    compared.check(at_least=len(cases) - len(cases) // 30)


def _are_as_good(source: Path, text: str, options: Mapping[str, Any], ours: str, theirs: str) -> bool:
    """Whether a search finds both texts, with scores that are the same but for the order of float32's sums; or finds
    ours with weights that differ by their rounding, which decides between beams of equal scores on the way.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    beams = options.get("num_beams", 4)

    def search(seed: int | None) -> tuple[list[str], list[float]]:
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).eval()
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + _ROUNDING * torch.randn(parameter.shape, generator=generator))
        searched = model.generate(
            **tokenizer(text, return_tensors="pt", truncation=True),
            **{**options, "num_beams": beams, "num_return_sequences": beams},
            return_dict_in_generate=True,
            output_scores=True,
        )
        texts = tokenizer.batch_decode(searched.sequences, skip_special_tokens=True)
        return texts, getattr(searched, "sequences_scores", torch.zeros(beams)).tolist()

    scores = dict(zip(*search(None), strict=True))
    if ours in scores and theirs in scores and abs(scores[ours] - scores[theirs]) < 1e-4:
        return True
    return any(search(seed)[0][0] == ours for seed in range(_ROUNDED))


class _Reference:
    """transformers, one text at a time."""

    def __init__(self, source: Path) -> None:
        self._model = transformers.AutoModelForSeq2SeqLM.from_pretrained(source).float().eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source)

    def generate(
        self, text: str, *, stop_token_ids: tuple[int, ...] = (), top_logprobs: int = 0, **options: Any
    ) -> list[dict[str, Any]]:
        """The texts, their tokens, why they ended, and the scores of a search. Log probabilities change nothing."""
        # Special tokens that a text spells are text.
        ids = self.tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt", split_special_tokens=True)
        ends = [2, *stop_token_ids]
        found = self._model.generate(
            ids["input_ids"],
            attention_mask=torch.ones_like(ids["input_ids"]),
            do_sample=False,
            eos_token_id=ends,
            output_scores=True,
            return_dict_in_generate=True,
            **{"num_beams": 1, **options, "early_stopping": _MEANINGS[options.get("early_stopping", 0)]},
        )
        texts = [self._said(row, ends) for row in found.sequences[:, 1:].tolist()]
        for sequence, score in zip(texts, getattr(found, "sequences_scores", ()), strict=False):
            sequence["score"] = float(score)
        return texts

    def _said(self, found: list[int], ends: list[int]) -> dict[str, Any]:
        found = ended(found, ends)
        return {
            "text": self.tokenizer.decode(found, skip_special_tokens=True),
            "token_ids": found,
            "end": f"FINISH_REASON_{'END' if found[-1] in ends else 'LENGTH'}",
        }
