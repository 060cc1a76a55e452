"""Translations are of the language and into the language that a request says, or the model's own."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, SummarizationInput, TranslationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.text_to_text import SUMMARIZATION, TRANSLATION
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import WordTokenizer

_LANGUAGES = {"en_XX": 1, "de_DE": 500, "fr_XX": 501}


def _model(**changes: Any) -> ModelSpec:
    # WordTokenizer begins a text with token 1, as a model of several languages does with that of its language.
    described: dict[str, Any] = {"languages": _LANGUAGES, "source_language": "en_XX", "decoder_start_token_ids": (2,)}
    return model_spec("translation", max_text_tokens=20, **described | changes)


def _complete(model: ModelSpec, **fields: Any) -> GenerationOptions:
    input = TranslationInput(text="a b", **fields)
    TRANSLATION.check(input, model)
    assert TRANSLATION.generation
    return TRANSLATION.generation.complete(input, model, 4)


def test_the_language_of_a_translation_is_its_first_token() -> None:
    assert _complete(_model(), target_language="de_DE").forced_bos_token_id == 500


def test_a_model_with_a_language_of_its_own_needs_none() -> None:
    assert _complete(_model(forced_bos_token_id=501)).forced_bos_token_id == 501
    assert not _complete(_model(decoder_start_token_ids=(501,))).HasField("forced_bos_token_id")


def test_a_text_in_another_language_has_its_token() -> None:
    encoded = [
        TRANSLATION.encode(TranslationInput(text="a b", source_language=name), WordTokenizer(), _model())
        for name in ("", "en_XX", "fr_XX")
    ]
    ids = [encoding.sequences[0]["input_ids"].tolist() for encoding in encoded]
    assert ids[0] == ids[1]
    assert ids[2] == [501, *ids[0][1:]]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "target_language: is missing; model 'small' knows: en_XX, de_DE, fr_XX"),
        ({"target_language": "xx"}, "target_language: 'xx' is not known to model 'small', which knows: en_XX, de_DE"),
        ({"source_language": "xx", "target_language": "de_DE"}, "source_language: 'xx' is not known to model 'small'"),
    ],
)
def test_a_missing_or_unknown_language_is_refused_with_the_known_ones(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        _complete(_model(), **fields)
    assert problem in refused.value.message


def test_a_model_of_one_pair_takes_no_language() -> None:
    with pytest.raises(InvalidInput, match="translates one pair of languages; leave it out"):
        _complete(_model(languages={}), target_language="de_DE")
    assert not _complete(_model(languages={})).HasField("forced_bos_token_id")


_PREFIXES = {"en": {"de": "in German : ", "fr": "in French : "}, "ro": {"en": "in English : "}}


def _words(prefixes: Any, source_language: str = "", **fields: Any) -> list[int]:
    """The tokens of a text with its prefix, by a model that has learned directions."""
    model = _model(languages={}, prefixes=prefixes, source_language=source_language)
    input = TranslationInput(text="a b", **fields)
    TRANSLATION.check(input, model)
    assert not _complete(model, **fields).HasField("forced_bos_token_id")
    tokenizer = WordTokenizer("in", "German", "French", "English", ":", "a", "b")
    ids: list[int] = TRANSLATION.encode(input, tokenizer, model).sequences[0]["input_ids"].tolist()
    return ids


def test_a_text_has_the_prefix_of_its_direction_before_it() -> None:
    assert _words(_PREFIXES, source_language="en", target_language="de") == [1, 10, 11, 14, 15, 16, 2]
    assert _words(_PREFIXES, source_language="en", target_language="fr") == [1, 10, 12, 14, 15, 16, 2]


def test_a_direction_that_is_the_only_one_needs_no_language() -> None:
    assert _words({"en": {"de": "in German : "}}, "en") == [1, 10, 11, 14, 15, 16, 2]


def test_a_text_may_name_its_direction_itself() -> None:
    prefixes = {"": {"de": "a ", "fr": "b "}}
    assert _words(prefixes) == [1, 15, 16, 2]
    assert _words(prefixes, target_language="fr") == [1, 16, 15, 16, 2]


def test_directions_of_one_text_are_encodings_of_their_own() -> None:
    inputs = [TranslationInput(text="a", target_language=name) for name in ("de", "fr")]
    assert TRANSLATION.traits(inputs[0]) != TRANSLATION.traits(inputs[1])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "source_language: is missing; model 'small' knows: en to de, en to fr, ro to en"),
        ({"source_language": "xx"}, "source_language: 'xx' is not known; model 'small' knows: en to de"),
        ({"source_language": "en"}, "target_language: is missing; model 'small' knows: en to de"),
        ({"source_language": "ro", "target_language": "de"}, "target_language: 'de' is not known; model 'small' knows"),
    ],
)
def test_a_direction_that_was_not_learned_is_refused(fields: dict[str, Any], problem: str) -> None:
    model = _model(languages={}, prefixes=_PREFIXES, source_language="")
    with pytest.raises(InvalidInput) as refused:
        TRANSLATION.check(TranslationInput(text="a", **fields), model)
    assert problem in refused.value.message


def test_targets_of_the_only_language_are_named_alone() -> None:
    model = _model(languages={}, prefixes={"": {"de": ">>de<< ", "fr": ">>fr<< "}}, source_language="")
    with pytest.raises(InvalidInput, match="target_language: is missing; model 'small' knows: de, fr"):
        TRANSLATION.check(TranslationInput(text="a"), model)


def test_a_summary_has_the_prefix_of_its_task() -> None:
    model = model_spec("summarization", max_text_tokens=20, decoder_start_token_ids=(2,), prefix="sum : ")
    encoded = SUMMARIZATION.encode(SummarizationInput(text="a"), WordTokenizer("sum", ":", "a"), model)
    assert encoded.sequences[0]["input_ids"].tolist() == [1, 10, 11, 12, 2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_new_tokens": 21}, "options.max_new_tokens: 21, must be 1 to 20"),
        ({"forced_bos_token_id": 1000}, "options.forced_bos_token_id: the id 1000, the vocabulary has 1000"),
        ({"forced_eos_token_id": 1000}, "options.forced_eos_token_id: the id 1000, the vocabulary has 1000"),
        ({"bad_words_ids": [{"token_ids": [5, 1000]}]}, "options.bad_words_ids: the id 1000, the vocabulary has 1000"),
        ({"bad_words_ids": [{"token_ids": []}]}, "options.bad_words_ids: one has 0 tokens, must have 1 to 32"),
        ({"bad_words_ids": [{"token_ids": [5]}] * 65}, "options.bad_words_ids: 65, the limit is 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], problem: str) -> None:
    model = model_spec("summarization", max_text_tokens=20, decoder_start_token_ids=(2,))
    with pytest.raises(InvalidInput) as refused:
        SUMMARIZATION.check(SummarizationInput(text="a", options=GenerationOptions(**options)), model)
    assert problem in refused.value.message


def test_a_long_text_leaves_all_of_the_decoder_to_its_summary() -> None:
    model = model_spec("summarization", max_text_tokens=20, decoder_start_token_ids=(2,))
    assert SUMMARIZATION.generation
    assert SUMMARIZATION.generation.complete(SummarizationInput(text="a"), model, 16).max_new_tokens == 20
