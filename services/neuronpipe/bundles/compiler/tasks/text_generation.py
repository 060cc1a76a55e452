"""Compiles for text generation: a decoder, and what its generation_config says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import transformers

from neuronpipe.bundles.compiler.attention_limits import check_kinds, rotary_limit
from neuronpipe.bundles.compiler.modules import Named, SourceModule, source_module
from neuronpipe.bundles.compiler.tasks.base import Batch, Measured, Outputs, SourceTask
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer
from neuronpipe.bundles.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.text_generation import GenerationFacts

FactsT = TypeVar("FactsT", bound=GenerationFacts)

# Settings of a generation_config that change what `generate` returns, and that are not supported → the values with
# which they change nothing.
_UNSUPPORTED = {
    "num_return_sequences": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (),
    "guidance_scale": (1.0,),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "stop_strings": ([],),
    "watermarking_config": (),
}


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForCausalLM, folder)
    check_kinds(type(model).__name__, model.config)
    limit = rotary_limit(model.config)
    chat = _chat(tokenizer.transformers_tokenizer)
    facts = {"text_generation": generation_facts(folder, model, GenerationFacts, **chat)}
    return source_module(
        Named(model, "logits"),
        model,
        "text_generation",
        tokenizer,
        outputs=("logits",),
        per_token=True,
        max_tokens=limit,
        facts=facts,
        remarks={"positions": f"longrope, whose factors of short texts hold up to {limit} tokens"} if limit else {},
    )


def generation_facts(folder: Path, model: Any, kind: type[FactsT], **further: Any) -> FactsT:
    """What a model's generation_config says, and `further` facts. Raises SetupError for what is not supported."""
    config = model.generation_config
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            raise SetupError(
                f"{folder}: its generation_config sets {name} to {value!r}, which is not supported; take it out there"
            )
    if config.do_sample and (config.num_beams or 1) > 1:
        raise SetupError(f"{folder}: its generation_config draws tokens with num_beams, which is not supported")
    ends = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    given = {
        name: value
        for name in GenerationFacts.model_fields
        if (value := getattr(config, name, None)) is not None and name != "end_token_ids"
    }
    given["end_token_ids"] = (ends,) if isinstance(ends, int) else tuple(ends or ())
    return kind(**given | further)


def _chat(tokenizer: Any) -> dict[str, Any]:
    """The template for chats, and the special tokens that it may name; none where the tokenizer has no default one."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return {}
    named = tokenizer.special_tokens_map.items()
    return {
        "chat_template": template,
        "template_variables": {name: token for name, token in named if isinstance(token, str)},
    }


def first_text(module: SourceModule, texts: Sequence[str]) -> Batch:
    """The first text alone: a decoder's tokenizer may have no padding."""
    encoded = module.tokenizer.transformers_tokenizer(texts[0], return_tensors="np", truncation=False)
    return {name: np.asarray(encoded[name], np.int64)[:, : module.max_tokens] for name in module.inputs}


def same_tokens(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    same: Measured = np.equal(outputs["logits"].argmax(axis=-1), reference["logits"].argmax(axis=-1)).mean(axis=-1)
    return same


MEANING = "share of the same tokens as transformers' generate, greedy"
TASK = SourceTask(_load, first_text, same_tokens, np.mean, MEANING)
