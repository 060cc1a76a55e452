"""Summarization and translation: a model with an encoder and a decoder writes a text about another text.

Equal to transformers' `generate`, as text generation is. These tasks have the same options.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import (
    GenerationOptions,
    SummarizationInput,
    SummarizationResult,
    TranslationInput,
    TranslationResult,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks import text_generation
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, traits_of
from neuronpipe.tasks.generated_text import Detokenizer
from neuronpipe.tasks.text_generation import ANNOTATIONS, GENERATION, complete, window_arrays
from neuronpipe.tasks.text_options import GenerationFacts, check_all_options


class TranslationFacts(GenerationFacts):
    """Facts about a model that translates. A model of one pair of languages has no list of languages."""

    encoded: ClassVar[tuple[str, ...]] = (*GenerationFacts.encoded, "languages", "source_language", "prefixes")

    prefixes: Mapping[str, Mapping[str, str]] = Field(
        {}, description="prefix of a text, by its language and the target language"
    )
    languages: Mapping[str, int] = Field({}, description="token of each language")
    source_language: str = Field("", description="language of texts without source_language")


def _check_text(input: SummarizationInput | TranslationInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    check_truncation(input)
    check_all_options(input.options, model)


def _check_translation(input: TranslationInput, model: ModelSpec) -> None:
    """Raises InvalidInput, which names the languages that the model knows."""
    _check_text(input, model)
    facts = TranslationFacts.of(model)
    if facts.prefixes:
        _prefix_of(input, model, facts)
        return
    languages = ", ".join(facts.languages)
    for name in ("source_language", "target_language"):
        language = getattr(input, name)
        if language and not facts.languages:
            raise InvalidInput(name, f"model {model.name!r} translates one pair of languages; leave it out")
        if language and language not in facts.languages:
            raise InvalidInput(
                name, f"{language[:64]!r} is not known to model {model.name!r}, which knows: {languages}"
            )
    says_target = input.target_language or facts.default_of("forced_bos_token_id") is not None
    if facts.languages and not says_target and not {*facts.languages.values()} & {*facts.decoder_start_token_ids}:
        raise InvalidInput("target_language", f"is missing; model {model.name!r} knows: {languages}")
    if input.target_language and input.options.HasField("forced_bos_token_id"):
        problem = "cannot be combined with target_language, which sets it"
        raise InvalidInput("options.forced_bos_token_id", problem, ["target_language"])


def _prefix_of(input: TranslationInput, model: ModelSpec, facts: TranslationFacts) -> str:
    """Returns the prefix of a text, by its language and the target language. Raises InvalidInput."""
    pairs = [(source, target) for source, targets in facts.prefixes.items() for target in targets]
    known_pairs = ", ".join(f"{source} to {target}" if source else target for source, target in pairs)
    source, target = input.source_language or facts.source_language, input.target_language
    knows = f"model {model.name!r} knows: {known_pairs}"
    if source not in facts.prefixes:
        raise _unknown("source_language", source, knows)
    targets = facts.prefixes[source]
    if not target and len(targets) == 1:
        (target,) = targets
    # A text may contain its prefix already, as is usual for Marian's models.
    if not target and input.text.startswith(tuple(prefix.rstrip() for prefix in targets.values() if prefix)):
        return ""
    if target not in targets:
        raise _unknown("target_language", target, knows)
    return targets[target]


def _unknown(field: str, language: str, knows: str) -> InvalidInput:
    return InvalidInput(field, f"{language[:64]!r} is not known; {knows}" if language else f"is missing; {knows}")


def _encode(input: SummarizationInput | TranslationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Encodes the text as one sequence. The annotation is the start of the new text. Raises InvalidInput."""
    facts, prefix = GenerationFacts.of(model), GenerationFacts.of(model).prefix
    if isinstance(facts, TranslationFacts) and isinstance(input, TranslationInput) and facts.prefixes:
        prefix = _prefix_of(input, model, facts)
    encoded = encode_text(tokenizer, model, input.text, None, input.truncation, prompt=prefix)
    start = window_arrays(list(facts.decoder_start_token_ids))
    return Encoded(encoded.sequences, start, encoded.truncated_tokens)


def _encode_translation(input: TranslationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Encodes as _encode does, with the token of the text's language instead of the tokenizer's default language."""
    encoded, facts = _encode(input, tokenizer, model), TranslationFacts.of(model)
    if not facts.languages or input.source_language in ("", facts.source_language):
        return encoded
    ids = encoded.sequences[0]["input_ids"].copy()
    # The language's token is before or behind the text, which may spell it as well.
    is_first = tokenizer.encode("").token_ids[0] == facts.languages[facts.source_language]
    ids[0 if is_first else -1] = facts.languages[input.source_language]
    return Encoded([{"input_ids": ids}], encoded.annotations, encoded.truncated_tokens)


def _complete_translation(input: TranslationInput, model: ModelSpec, tokens: int) -> GenerationOptions:
    """Completes the options. The first token of the translation is the token of its language."""
    options, languages = complete(input, model, tokens), TranslationFacts.of(model).languages
    if languages and input.target_language:
        options.forced_bos_token_id = languages[input.target_language]
    return options


def _decode(
    kind: type[SummarizationResult | TranslationResult],
    input: SummarizationInput | TranslationInput,
    model: ModelSpec,
    annotations: ArraySets,
    outputs: ArraySets,
    detokenizer: Detokenizer,
) -> SummarizationResult | TranslationResult:
    return kind(sequences=text_generation.decode(input, model, annotations, outputs, detokenizer).sequences)


_traits = traits_of("text", "truncation")
_translation_traits = traits_of("text", "truncation", "source_language", "target_language")
_decode_summary, _decode_translation = partial(_decode, SummarizationResult), partial(_decode, TranslationResult)
_SUMMARY = "summarization", _check_text, _traits, _encode, _decode_summary
_TRANSLATED = "translation", _check_translation, _translation_traits, _encode_translation, _decode_translation
SUMMARIZATION = Task(*_SUMMARY, ("options",), GenerationFacts, ANNOTATIONS, GENERATION)
_TRANSLATION_OPTIONS = replace(GENERATION, complete=_complete_translation)
TRANSLATION = Task(*_TRANSLATED, ("options",), TranslationFacts, ANNOTATIONS, _TRANSLATION_OPTIONS)
