"""Hugging Face's forms of summaries and translations, asked by its client: the options do what `generate` does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.systems.http_server import HttpServer, running_http_server

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_TEXT = "The tower was built for an exhibition in Paris."
# Special tokens, of which the texts of the tiny models with random weights would consist.
_SPECIAL = {"bad_words_ids": [[number] for number in range(5)]}
_BEAMS = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True}


@pytest.fixture(scope="module")
def server(writers_folder: Path) -> Iterator[HttpServer]:
    with running_http_server(writers_folder / "repository") as server:
        yield server


def _generated(source: Path, **options: Any) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(source), AutoModelForSeq2SeqLM.from_pretrained(source)
    ids = model.generate(**tokenizer(_TEXT, return_tensors="pt"), **options)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 9, "min_length": 7, "num_beams": 1},
        {"max_length": 14, "min_length": 12, **_BEAMS},
        {"max_new_tokens": 12, "num_beams": 1, "no_repeat_ngram_size": 1, "repetition_penalty": 1.7},
    ],
    ids=str,
)
def test_the_options_of_a_summary_and_a_translation_are_those_of_generate(
    server: HttpServer, writers_folder: Path, options: dict[str, Any]
) -> None:
    options = options | _SPECIAL
    hub = huggingface_hub.InferenceClient(model=f"{server.url}/models/summarizer", timeout=60)
    summary = hub.summarization(_TEXT, generate_parameters=options)
    assert summary["summary_text"] == _generated(writers_folder / "bart", **options) != ""
    hub = huggingface_hub.InferenceClient(model=f"{server.url}/models/translator", timeout=60)
    translation = hub.translation(_TEXT, generate_parameters=options)
    assert translation.translation_text == _generated(writers_folder / "marian", **options) != ""
