"""Compiles for summarization and translation: an encoder, a decoder, and what their generation_config says."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.bundles.compiler.architectures import positions
from neuronpipe.bundles.compiler.modules import Named, SourceModule, source_module
from neuronpipe.bundles.compiler.tasks.base import SourceTask
from neuronpipe.bundles.compiler.tasks.text_generation import MEANING, first_text, generation_facts, same_tokens
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer
from neuronpipe.bundles.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.text_generation import GenerationFacts
from neuronpipe.tasks.text_to_text import TranslationFacts

# The default of transformers, which no model means.
_UNSET_LENGTH = 20
_BEAMS = 4


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
    return source_module(
        _Both(model, "logits"),
        model,
        task,
        tokenizer,
        outputs=("logits",),
        per_token=True,
        facts={task: _facts(task, folder, model, tokenizer)},
    )


def _facts(task: str, folder: Path, model: Any, tokenizer: SourceTokenizer) -> GenerationFacts:
    config = model.generation_config
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
    most = (positions(model.config) or 512) - 1
    further: dict[str, Any] = {"decoder_start_token_ids": (start,), "max_text_tokens": most}
    # As pipelines of transformers 4 have it, which take one beam for none that is set.
    if config.num_beams in (None, 1):
        further["num_beams"] = 1 if config.do_sample else _BEAMS
    # Both lengths count the first token, which is not generated.
    if config.max_length not in (None, _UNSET_LENGTH) and config.max_new_tokens is None:
        further["max_new_tokens"] = min(config.max_length - 1, most)
    if config.min_length:
        further["min_new_tokens"] = max(config.min_length - 1, config.min_new_tokens or 0)
    if task != "translation":
        return generation_facts(folder, model, GenerationFacts, **further)
    own = tokenizer.transformers_tokenizer
    languages = getattr(own, "lang_code_to_id", None) or {}
    further["languages"] = {str(name): int(token_id) for name, token_id in languages.items()}
    further["source_language"] = str(own.src_lang) if languages else ""
    return generation_facts(folder, model, TranslationFacts, **further)


SUMMARIZATION = SourceTask(partial(_load, "summarization"), first_text, same_tokens, np.mean, MEANING)
TRANSLATION = SourceTask(partial(_load, "translation"), first_text, same_tokens, np.mean, MEANING)
