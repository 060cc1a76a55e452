"""Compiles for summarization and translation: an encoder, a decoder, and what their generation_config says."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.architectures import positions
from neuronpipe.compiler.marian_tokenizer import language_codes
from neuronpipe.compiler.modules import Named, SourceModule, source_module
from neuronpipe.compiler.sentence_transformers import read_json
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tasks.text_generation import (
    MEANING,
    UNSET_LENGTH,
    checked,
    first_text,
    generation_facts,
    same_tokens,
)
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.text_generation import GenerationFacts
from neuronpipe.tasks.text_to_text import TranslationFacts

_BEAMS = 4
# Of a model without positions whose tokenizer has no limit, as of what it reads (modules.py).
_NO_LIMIT_TOKENS = 512


class _Both(Named):
    """The model with its source as its text."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=input_ids, return_dict=True
        )
        return {name: result[name] for name in self.outputs}


def _load(task: str, folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForSeq2SeqLM, folder)
    module = source_module(
        _Both(model, "logits"),
        model,
        task,
        tokenizer,
        outputs=("logits",),
        per_token=True,
        facts={task: _facts(task, folder, model, tokenizer)},
    )
    return checked(folder, module)


def _facts(task: str, folder: Path, model: Any, tokenizer: SourceTokenizer) -> GenerationFacts:
    config = model.generation_config
    parameters, prefixes = _of_task(task, folder)
    # As pipelines of transformers 4: the length of a task counts only where the model has one, too.
    length = parameters.pop("max_length", None)
    if config.max_length not in (None, UNSET_LENGTH) and length is not None:
        parameters["max_length"] = length
    config.update(**parameters)
    start = next(
        (
            one
            for one in (config.decoder_start_token_id, model.config.decoder_start_token_id, config.bos_token_id)
            if one is not None
        ),
        None,
    )
    if start is None:
        raise SetupError(f"{folder}: its generation_config has no decoder_start_token_id, which its texts begin with")
    # A model without positions (T5) writes as much as it reads, or more if it says so.
    said = config.max_length if config.max_length not in (None, UNSET_LENGTH) else 0
    most = (positions(model.config) or max(tokenizer.max_tokens or _NO_LIMIT_TOKENS, said)) - 1
    further: dict[str, Any] = {"decoder_start_token_ids": (start,), "max_text_tokens": most}
    further["prefix"] = prefixes.pop("", str(read_json(folder / "config.json").get("prefix") or ""))
    # As pipelines of transformers 4 have it, which take one beam for none that is set.
    if config.num_beams in (None, 1):
        further["num_beams"] = 1 if config.do_sample else _BEAMS
    # Both lengths count the first token, which is not generated.
    further |= {"max_length": None, "min_length": 0}
    if config.max_length not in (None, UNSET_LENGTH) and config.max_new_tokens is None:
        further["max_new_tokens"] = min(config.max_length - 1, most)
    if config.min_length:
        further["min_new_tokens"] = max(config.min_length - 1, config.min_new_tokens or 0)
    if task != "translation":
        return generation_facts(folder, model, GenerationFacts, **further)
    own = tokenizer.transformers_tokenizer
    languages = getattr(own, "lang_code_to_id", None) or {}
    if codes := language_codes(own):
        source = str(own.init_kwargs.get("source_lang") or "")
        further["prefixes"], further["source_language"] = {source: {one: f">>{one}<< " for one in codes}}, source
        return generation_facts(folder, model, TranslationFacts, **further)
    if prefixes:
        further["prefixes"], further["source_language"] = _directions(prefixes)
        return generation_facts(folder, model, TranslationFacts, **further)
    further["languages"] = {str(name): int(token_id) for name, token_id in languages.items()}
    further["source_language"] = str(own.src_lang) if languages else ""
    return generation_facts(folder, model, TranslationFacts, **further)


def _of_task(task: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What config.json says of a task (task_specific_params): settings of `generate`, and what is put before texts.

    The latter is by the languages, as in en_to_de, or by the empty word. Raises SetupError where directions differ in
    the former.
    """
    said = read_json(folder / "config.json").get("task_specific_params") or {}
    found = {name: dict(one) for name, one in said.items() if name == task or name.startswith(f"{task}_")}
    directions = {name.removeprefix(task).removeprefix("_"): str(one.pop("prefix", "")) for name, one in found.items()}
    several = list(found.values())
    if any(one != several[0] for one in several):
        raise SetupError(
            f"{folder}: task_specific_params in its config.json has other settings for some languages than for others, "
            "which is not supported; make them equal"
        )
    return several[0] if several else {}, directions


def _directions(prefixes: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], str]:
    """What is put before texts by their language and that of the translation, and the language of all if it is one."""
    found: dict[str, dict[str, str]] = {}
    for name, prefix in prefixes.items():
        source, _, target = name.partition("_to_")
        found.setdefault(source, {})[target] = prefix
    return found, next(iter(found)) if len(found) == 1 else ""


SUMMARIZATION = SourceTask(partial(_load, "summarization"), first_text, same_tokens, np.mean, MEANING)
TRANSLATION = SourceTask(partial(_load, "translation"), first_text, same_tokens, np.mean, MEANING)
