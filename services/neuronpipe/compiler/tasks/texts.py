"""Compiles for tasks of generated texts: a decoder, with or without an encoder, and its generation_config."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from pydantic import ValidationError
from transformers.utils.chat_template_utils import _compile_jinja_template

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.compiler.architectures import check_kinds, positions
from neuronpipe.compiler.modules import NO_LIMIT_TOKENS, Named, Outputs, SampleBatch, SourceModule, source_module
from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.saved_settings import unsupported_generation
from neuronpipe.compiler.tasks.base import Measured, SourceTask
from neuronpipe.compiler.tokenizers import SourceTokenizer, language_codes, load_tokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.core.model import problems_of
from neuronpipe.stages.tokenizer.chat import variables_of
from neuronpipe.tasks.text_options import (
    CALL_MARKS,
    REASONING_MARKS,
    GenerationFacts,
    check_options,
    complete_options,
    reasoning_marks_of,
)
from neuronpipe.tasks.text_to_text import TranslationFacts

FactsT = TypeVar("FactsT", bound=GenerationFacts)

# The default of transformers, which no model sets on purpose.
UNSET_LENGTH = 20


def _load_text_generation(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForCausalLM, folder)
    check_kinds(type(model).__name__, model.config)
    chat = chat_facts(folder, tokenizer.transformers_tokenizer)
    described: dict[str, Any] = {"facts": generation_facts(folder, model, GenerationFacts, **chat), "per_token": True}
    return checked(folder, source_module(Named(model, "logits"), model, "text_generation", tokenizer, **described))


def generation_facts(folder: Path, model: Any, kind: type[FactsT], **further: Any) -> FactsT:
    """Reads a model's generation_config, and adds `further` facts. Raises SetupError if a value is not supported."""
    config = model.generation_config
    if refused := unsupported_generation(config):
        name, value = refused
        raise SetupError(
            f"{folder}: its generation_config sets {name} to {value!r}, which is not supported; remove the field if "
            "the model works without it"
        )
    if config.do_sample and (config.num_beams or 1) > 1:
        raise SetupError(f"{folder}: its generation_config draws tokens with num_beams, which is not supported")
    ends = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    saved = {
        name: value
        for name in GenerationFacts.model_fields
        if (value := getattr(config, name, None)) is not None and name != "end_token_ids"
    }
    saved["end_token_ids"] = (ends,) if isinstance(ends, int) else tuple(ends or ())
    if saved.get("max_length") == UNSET_LENGTH:
        del saved["max_length"]
    for name in ("suppress_tokens", "begin_suppress_tokens"):  # ids that no token has are without effect
        saved[name] = [
            token_id
            for token_id in saved.get(name) or ()
            if not isinstance(token_id, int) or 0 <= token_id < model.config.vocab_size
        ]
    try:
        return kind(**saved | further)
    except ValidationError as error:
        raise SetupError(f"{folder}: its generation_config cannot be read: {problems_of(error)}") from error


def checked(folder: Path, module: SourceModule) -> SourceModule:
    """Returns a module whose model takes a request without options. Raises SetupError, which names the field."""
    spec = module.spec("model", 1, {})
    try:
        check_options(complete_options(GenerationOptions(), spec, 1), spec)
    except InvalidInput as error:
        name = error.field.removeprefix("options.")
        value = getattr(GenerationFacts.of(spec), name, None)
        raise SetupError(
            f"{folder}: its generation_config sets {name} to {value!r}, which is not supported: {error.problem}"
        ) from error
    except (ValueError, TypeError) as error:  # numbers that a field of the options cannot hold
        raise SetupError(f"{folder}: its generation_config has a value that no request can have: {error}") from error
    for tokens, _ in GenerationFacts.of(spec).sequence_bias:
        if not tokens or not 0 <= min(tokens) <= max(tokens) < spec.vocabulary_size:
            raise SetupError(
                f"{folder}: its generation_config sets sequence_bias for the tokens {list(tokens)}, the vocabulary has "
                f"{spec.vocabulary_size}"
            )
    return module


# Settings of a template's thinking → its variables; see GenerationFacts.opens_reasoning.
_THINKING: Mapping[str, Mapping[str, bool]] = {
    "default": {},
    "on": {"enable_thinking": True, "thinking": True},
    "off": {"enable_thinking": False, "thinking": False},
}


def chat_facts(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Returns the chat template, and the special tokens that it may name; empty for a tokenizer without a template."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return {}
    with refusing(f"{folder}: its chat_template is none", advice="; correct it, or compile a copy without it"):
        _compile_jinja_template(template)
    special_tokens, marks = tokenizer.special_tokens_map.items(), reasoning_marks_of(template)
    return {
        "chat_template": template,
        "template_variables": {name: token for name, token in special_tokens if isinstance(token, str)},
        "read_variables": variables_of(template),
        "call_mark_ids": _call_mark_ids(tokenizer) if CALL_MARKS[0] in template else None,
        "reasoning_end_id": tokenizer.get_vocab().get(marks[1]) if marks else None,
        "opens_reasoning": [word for word, variables in _THINKING.items() if _opens_reasoning(tokenizer, variables)],
    }


def _call_mark_ids(tokenizer: Any) -> list[int] | None:
    """Returns the added tokens that are the marks of calls; an empty list if none is, None if only one of them is."""
    added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    ids = [added[mark] for mark in CALL_MARKS if mark in added]
    return ids if len(ids) in (0, len(CALL_MARKS)) else None


def _opens_reasoning(tokenizer: Any, variables: Mapping[str, bool]) -> bool:
    """Tells whether the template's prompt ends in the model's reasoning, with these variables."""
    chat = [{"role": "user", "content": "a"}]
    try:
        prompt: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **variables)
    except Exception:  # a template may raise any error, also for a chat that it does not take
        return False
    return any(prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in REASONING_MARKS)


def first_text(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    """Encodes the first text alone, because a decoder's tokenizer may have no padding."""
    encoded = module.tokenizer.transformers_tokenizer(texts[0], return_tensors="np", truncation=False)
    return {name: np.asarray(encoded[name], np.int64)[:, : module.max_tokens] for name in module.inputs}


def same_tokens(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured:
    return np.equal(outputs["logits"].argmax(axis=-1), reference["logits"].argmax(axis=-1)).mean(axis=-1)


MEANING = "share of the same tokens as transformers' generate, greedy"
TEXT_GENERATION = SourceTask(
    _load_text_generation,
    first_text,
    same_tokens,
    np.mean,
    MEANING,
    load_tokenizer=partial(load_tokenizer, of_prompts=True),
)


_BEAMS = 4


class _Both(Named):
    """An encoder-decoder whose decoder reads the same tokens as its encoder."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": input_ids}
        return self._named(self.model(**inputs, return_dict=True))


def _load_text_to_text(task: str, folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForSeq2SeqLM, folder)
    facts = _facts(task, folder, model, tokenizer)
    return checked(folder, source_module(_Both(model, "logits"), model, task, tokenizer, per_token=True, facts=facts))


def _facts(task: str, folder: Path, model: Any, tokenizer: SourceTokenizer) -> GenerationFacts:
    config = model.generation_config
    parameters, prefixes = _task_settings(task, folder)
    # As in pipelines of transformers 4: the length of a task counts only if the model also sets a length.
    if config.max_length in (None, UNSET_LENGTH) or parameters.get("max_length") is None:
        parameters.pop("max_length", None)
    config.update(**parameters)
    own_length = 0 if config.max_length in (None, UNSET_LENGTH) else config.max_length
    starts = (config.decoder_start_token_id, model.config.decoder_start_token_id, config.bos_token_id)
    if (start := next((token_id for token_id in starts if token_id is not None), None)) is None:
        raise SetupError(f"{folder}: its generation_config has no decoder_start_token_id, which its texts begin with")
    if not 0 <= start < model.config.vocab_size:
        raise SetupError(
            f"{folder}: its generation_config sets decoder_start_token_id to {start}, the vocabulary has "
            f"{model.config.vocab_size}"
        )
    # A model without positions (T5) writes as many tokens as it reads, or more if its max_length is larger.
    max_tokens = (positions(model.config) or max(tokenizer.max_tokens or NO_LIMIT_TOKENS, own_length)) - 1
    further: dict[str, Any] = {"decoder_start_token_ids": (start,), "max_text_tokens": max_tokens}
    saved = [read_object(folder / name, may_lack=True) for name in ("config.json", "generation_config.json")]
    further["prefix"] = prefixes.pop("", str(saved[0].get("prefix") or ""))
    # As in pipelines of transformers 4, if the model's files name no number.
    saved_beams = [settings.get("num_beams") for settings in (parameters, *saved)]
    if config.num_beams in (None, 1) and not any(saved_beams):
        further["num_beams"] = 1 if config.do_sample else _BEAMS
    # Both lengths count the first token, which is not generated.
    further |= {"max_length": None, "min_length": 0}
    if own_length and config.max_new_tokens is None:
        further["max_new_tokens"] = min(own_length - 1, max_tokens)
    if config.min_length:
        further["min_new_tokens"] = max(config.min_length - 1, config.min_new_tokens or 0)
    if task != "translation":
        return generation_facts(folder, model, GenerationFacts, **further)
    transformers_tokenizer = tokenizer.transformers_tokenizer
    if codes := language_codes(transformers_tokenizer):
        source = str(transformers_tokenizer.init_kwargs.get("source_lang") or "")
        further["prefixes"], further["source_language"] = {source: {code: f">>{code}<< " for code in codes}}, source
    elif prefixes:
        further["prefixes"], further["source_language"] = _directions(prefixes)
    elif own_language := getattr(transformers_tokenizer, "src_lang", None):
        # Languages of mBART and NLLB are special tokens without another name.
        known_tokens = {token for token in transformers_tokenizer.special_tokens_map.values() if isinstance(token, str)}
        languages = [token for token in transformers_tokenizer.all_special_tokens if token not in known_tokens]
        further["languages"] = dict(
            zip(languages, transformers_tokenizer.convert_tokens_to_ids(languages), strict=True)
        )
        further["source_language"] = own_language
    return generation_facts(folder, model, TranslationFacts, **further)


def _task_settings(task: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads task_specific_params of config.json: the settings of `generate` for a task, and its prefixes.

    The prefixes are by the languages, such as en_to_de, or by an empty name. Raises SetupError for directions with
    different settings.
    """
    saved = read_object(folder / "config.json", may_lack=True).get("task_specific_params") or {}
    names = [name for name in saved if name == task or name.startswith(f"{task}_")]
    settings_of_task = {name: saved[name] or {} for name in names}
    if wrong := [name for name, settings in settings_of_task.items() if not isinstance(settings, dict)]:
        raise SetupError(f"{folder}: task_specific_params of {wrong[0]} in its config.json are no object of settings")
    settings_of_task = {name: dict(settings) for name, settings in settings_of_task.items()}
    directions = {
        name.removeprefix(task).removeprefix("_"): str(settings.pop("prefix", ""))
        for name, settings in settings_of_task.items()
    }
    different = list(settings_of_task.values())
    if any(settings != different[0] for settings in different):
        raise SetupError(
            f"{folder}: task_specific_params in its config.json has other settings for some languages than for others, "
            "which is not supported; make them equal"
        )
    return different[0] if different else {}, directions


def _directions(prefixes: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], str]:
    """Returns the prefixes by source and target language, and the source language if it is the only source language."""
    prefixes_by_language: dict[str, dict[str, str]] = {}
    for name, prefix in prefixes.items():
        source, _, target = name.partition("_to_")
        prefixes_by_language.setdefault(source, {})[target] = prefix
    return prefixes_by_language, next(iter(prefixes_by_language)) if len(prefixes_by_language) == 1 else ""


SUMMARIZATION = SourceTask(partial(_load_text_to_text, "summarization"), first_text, same_tokens, np.mean, MEANING)
TRANSLATION = SourceTask(partial(_load_text_to_text, "translation"), first_text, same_tokens, np.mean, MEANING)
