"""Text generation equals transformers' `generate`, greedy in float32, through four processes, with texts that come and
leave while others are generated.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import transformers

from neuronpipe.api.v1.inference_pb2 import GenerateResponse
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.client import AsyncClient
from tests.models.decoders import save_decoder
from tests.oracle.comparison import Comparison
from tests.oracle.generation import REFERENCE, Case, ended, options_of, read_a_chunk_and_leave, said
from tests.oracle.serving import Served, serving, serving_texts
from tests.oracle.texts import PICKED, generated
from tests.suite.constants import constants
from tests.suite.sampling import Sample, sample_of

_MAX_TOKENS = 192
_FAMILIES = ("gpt2", "llama")
# Of these a share: `make oracle` compares all of them.
_OTHERS = ("qwen2", "qwen3", "mistral", "phi", "phi3", "gemma2", "gemma3", "llama-tied")
# Prompts take several steps, and a cache of 24 to 48 blocks is less than 12 texts need, some with 4 beams: some are
# preempted. Random models repeat themselves, so drafts are often right.
_LIMITS = ("--max-batch-size", "12", "--kv-cache-bytes", str(768 << 10), "--prompt-lookup-tokens", "4")
_STEP_TOKENS = 24
_SMALL: dict[str, Any] = {
    "stage_options": {"neuron-executor": _LIMITS},
    "environment": constants(step_tokens=_STEP_TOKENS),
}
_AT_ONCE = 24
_LEFT = Truncation.TRUNCATION_LEFT
# Sums of the logarithms of up to 60 probabilities, in float32.
_SCORES = 1e-4


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decoders")
    families = (*_FAMILIES, *sample_of(pytestconfig).some(_OTHERS))
    return {family: save_decoder(family, folder / family) for family in families}


@pytest_asyncio.fixture(scope="module")
async def served(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    named = {family: ("text_generation", source) for family, source in sources.items()}
    async with serving(tmp_path_factory.mktemp("repository"), named, **_SMALL) as running:
        yield running


def _cases() -> Iterator[Case]:
    """Prompts of up to 192 tokens, and options in turns."""
    chosen = random.Random(31)
    prompts = [*PICKED, *generated(32, 66, words=(1, 30)), *generated(33, 12, words=(60, 200))]
    for number, prompt in enumerate(prompts):
        options: dict[str, Any] = {"max_new_tokens": chosen.choice((1, 8, 32, 60))}
        options |= (
            {},
            {"repetition_penalty": 1.3},
            {"min_new_tokens": min(8, options["max_new_tokens"])},
            {"stop_token_ids": chosen.sample(range(5, 1200), 40)},
            {"repetition_penalty": 0.8, "min_new_tokens": 1},
            {"stop_strings": ["e", "at"]},
            {"num_beams": 4, "no_repeat_ngram_size": 3, "num_return_sequences": 4},
            {"num_beams": 3, "length_penalty": 2.0, "stop_token_ids": chosen.sample(range(5, 1200), 40)},
        )[number % 8]
        yield prompt, options


@pytest.mark.parametrize("family", [*_FAMILIES, *_OTHERS])
async def test_texts_equal_those_of_generate(
    family: str, served: Served, sources: dict[str, Path], sample: Sample, comparison: Callable[[str, str], Comparison]
) -> None:
    if family not in sources:
        pytest.skip("not in the sample of this run")
    compared = comparison(f"text_generation-{family}", REFERENCE)
    cases = sample.draw(_cases(), options_of, at_least=40)
    await _compare(family, served.client, _Reference(sources[family]), cases, compared)
    compared.check(at_least=100 if sample.is_whole else len(cases))


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "neuronx"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
async def test_texts_of_other_back_ends_equal_those_of_generate(
    family: str,
    backend: str,
    request: pytest.FixtureRequest,
    sample: Sample,
    comparison: Callable[[str, str], Comparison],
    tmp_path: Path,
) -> None:
    """Neuron is its contract double. Six slots are less than twelve texts need, some with 4 beams."""
    compared = comparison(f"text_generation-{family}-{backend}", REFERENCE)
    cases, source = sample.draw(_cases(), options_of, at_least=40), save_decoder(family, tmp_path / "source")
    named = {family: ("text_generation", source)}
    machine = constants(
        request.getfixturevalue("neuron_double") if backend == "neuronx" else {}, step_tokens=_STEP_TOKENS
    )
    async with serving_texts(backend, tmp_path, named, f"6x{_MAX_TOKENS}", _LIMITS, machine) as served:
        await _compare(family, served.client, _Reference(source), cases, compared)
    compared.check(at_least=100 if sample.is_whole else len(cases))


async def _compare(
    family: str,
    client: AsyncClient,
    reference: "_Reference",
    cases: Sequence[Case],
    compared: Comparison,
) -> None:
    turns, chance = asyncio.Semaphore(_AT_ONCE), random.Random(34)

    async def ask(number: int, prompt: str, options: dict[str, Any]) -> list[GenerateResponse]:
        async with turns:
            await asyncio.sleep(chance.random() / 50)
            if number % 4 == 0:
                await read_a_chunk_and_leave(client.generate(family, prompt, truncation=_LEFT, max_new_tokens=60))
            return [event async for event in client.generate(family, prompt, truncation=_LEFT, **options)]

    found = await asyncio.gather(*(ask(number, *case) for number, case in enumerate(cases)))
    for (prompt, options), events in zip(cases, found, strict=True):
        texts = events[-1].response.result.text_generation.sequences
        expected = reference.generate(prompt, **options)
        compared.compare((prompt, options), [*map(said, texts)], expected, tolerance=_SCORES)
        for number, text in enumerate(texts):
            chunks = [event.chunk for event in events if event.HasField("chunk") and event.chunk.sequence == number]
            assert "".join(chunk.text for chunk in chunks) == text.text
            assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(text.token_ids)


class _Reference:
    """transformers, one text at a time."""

    def __init__(self, source: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(source).float().eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self._ends = [self._model.generation_config.eos_token_id]

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        **options: Any,
    ) -> list[dict[str, Any]]:
        """The texts, their tokens, why they ended, and the scores of a search."""
        ids = self._prompt_ids(prompt, max_new_tokens)
        ends = [*self._ends, *stop_token_ids]
        found = self._model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=1,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        texts = [self._ended(ids, row, ends, stop_strings) for row in found.sequences[:, len(ids) :].tolist()]
        for sequence, score in zip(texts, getattr(found, "sequences_scores", ()), strict=False):
            sequence["score"] = float(score)
        return texts

    def _ended(self, ids: list[int], found: list[int], ends: list[int], stop_strings: Sequence[str]) -> dict[str, Any]:
        found = ended(found, ends)
        for count in range(1, len(found) + 1):
            text = self._text(ids, found[:count])
            if places := [place for stop in stop_strings if (place := text.find(stop)) >= 0]:
                return self._said(text[: min(places)], found[:count], "STOP_STRING")
        return self._said(self._text(ids, found), found, "END" if found[-1] in ends else "LENGTH")

    def _prompt_ids(self, prompt: str, max_new_tokens: int) -> list[int]:
        """As TRUNCATION_LEFT cuts it: the special tokens stay."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        excess = len(ids) - (_MAX_TOKENS - max_new_tokens)
        return ids if excess <= 0 else [ids[0], *ids[1 + excess :]]

    def _text(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        whole = self._tokenizer.decode([*prompt_ids, *token_ids], skip_special_tokens=True)
        return str(whole[len(self._tokenizer.decode(prompt_ids, skip_special_tokens=True)) :])

    def _said(self, text: str, token_ids: list[int], end: str) -> dict[str, Any]:
        return {"text": text, "token_ids": token_ids, "end": f"FINISH_REASON_{end}"}
