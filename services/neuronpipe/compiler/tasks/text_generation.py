"""Compiles for text generation: a decoder, and what its generation_config says."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import transformers
from pydantic import ValidationError

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.compiler.attention_limits import check_kinds, rotary_limit
from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.tasks.base import Measured, SourceTask
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.tasks.text_generation import GenerationFacts, check_options, complete_options

FactsT = TypeVar("FactsT", bound=GenerationFacts)

# Fields of a generation_config that choose no tokens: ids that are found elsewhere, what `generate` returns, how its
# cache is kept, and how tokens are guessed ahead, which leaves the text as it is.
_WITHOUT_EFFECT = frozenset(
    {
        "bos_token_id",
        "pad_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "_from_model_config",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "use_cache",
        "cache_config",
        "max_cache_len",
        "low_memory",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
        "use_mtp",
        "speculation_type",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
    }
)
# Others that are not applied → the values, besides None, with which they change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_return_sequences": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "stop_strings": ([],),
    # All but the quantized one hold the same numbers.
    "cache_implementation": ("dynamic", "dynamic_full", "static", "hybrid", "sliding_window", "offloaded"),
}
# The default of transformers, which no model means.
UNSET_LENGTH = 20


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForCausalLM, folder)
    check_kinds(type(model).__name__, model.config)
    limit = rotary_limit(model.config)
    chat = _chat(tokenizer.transformers_tokenizer)
    facts = {"text_generation": generation_facts(folder, model, GenerationFacts, **chat)}
    module = source_module(
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
    return checked(folder, module)


def generation_facts(folder: Path, model: Any, kind: type[FactsT], **further: Any) -> FactsT:
    """What a model's generation_config says, and `further` facts. Raises SetupError for what is not supported."""
    config = model.generation_config
    _check_supported(folder, config)
    if config.do_sample and (config.num_beams or 1) > 1:
        raise SetupError(f"{folder}: its generation_config draws tokens with num_beams, which is not supported")
    ends = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    given = {
        name: value
        for name in GenerationFacts.model_fields
        if (value := getattr(config, name, None)) is not None and name != "end_token_ids"
    }
    given["end_token_ids"] = (ends,) if isinstance(ends, int) else tuple(ends or ())
    if given.get("max_length") == UNSET_LENGTH:
        del given["max_length"]
    for name in ("suppress_tokens", "begin_suppress_tokens"):  # ids that no token has are without effect
        given[name] = [one for one in given.get(name) or () if 0 <= one < model.config.vocab_size]
    try:
        return kind(**given | further)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise SetupError(f"{folder}: its generation_config cannot be read: {problems}") from error


def _check_supported(folder: Path, config: Any) -> None:
    """Raises SetupError, which names the first field that changes what `generate` returns, and that is not applied."""
    applied = {*GenerationFacts.model_fields} | _WITHOUT_EFFECT
    for name in sorted({*transformers.GenerationConfig().to_dict(), *_NEUTRAL} - applied):
        value = getattr(config, name, None)
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise SetupError(
                f"{folder}: its generation_config sets {name} to {value!r}, which is not supported; take it out there"
            )


def checked(folder: Path, module: SourceModule) -> SourceModule:
    """The module of a model that takes a request without options.

    Raises SetupError, which names the field of its generation_config for which it would refuse all of them.
    """
    spec = module.spec("model", 1, {})
    try:
        check_options(complete_options(GenerationOptions(), spec, 1), spec)
    except InvalidInput as error:
        name = error.field.removeprefix("options.")
        value = getattr(GenerationFacts.of(spec), name, None)
        raise SetupError(
            f"{folder}: its generation_config sets {name} to {value!r}, which is not supported: {error.problem}"
        ) from error
    except (ValueError, TypeError) as error:  # of numbers that a field of the options cannot hold
        raise SetupError(f"{folder}: its generation_config has a value that no request can have: {error}") from error
    for tokens, _ in GenerationFacts.of(spec).sequence_bias:
        if not tokens or not 0 <= min(tokens) <= max(tokens) < spec.vocabulary_size:
            raise SetupError(
                f"{folder}: its generation_config sets sequence_bias for the tokens {list(tokens)}, the vocabulary has "
                f"{spec.vocabulary_size}"
            )
    return module


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
