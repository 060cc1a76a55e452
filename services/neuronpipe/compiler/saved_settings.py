"""Every field that the files of a model can contain, and its rule.

A field is applied, here or by the library that loads the file, or it has no effect on results. Otherwise its value is
refused by name unless it changes nothing. Other fields are reported to the user. null means that a field is not given.
tests/contract/test_saved_settings.py compares the tables with the sources of the libraries.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import transformers

from neuronpipe.compiler.own_code import KNOWN_FORM
from neuronpipe.compiler.sentence_transformers import (
    CONFIGURATION,
    limits_file,
    read_modules,
    read_object,
    transformer_folder,
)
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.text_generation import GenerationFacts


@dataclass(frozen=True, slots=True)
class Rule:
    """The effect of a field. A value that `accepts` does not accept is reported or, for other effects, refused."""

    effect: Literal["applied", "no effect", "reported"]
    accepts: Callable[[Any], bool] = lambda value: True


class Fields(NamedTuple):
    """A row of a table: a rule and the names of its fields."""

    rule: Rule
    names: tuple[str, ...]


# The rule of each field by its name.
Rules: TypeAlias = Mapping[str, Rule]


def limited(accepts: Callable[[Any], bool]) -> Rule:
    """A field that is applied, with values that pass a test."""
    return Rule("applied", accepts)


def one_of(*values: object) -> Rule:
    """A field that is applied, or changes nothing, with these values only."""
    return limited(lambda value: value in values)


def _table(*rows: Fields) -> Rules:
    """The rule of each name. If rows repeat a name, the last row counts."""
    return {name: row.rule for row in rows for name in row.names}


def _only(*names: str) -> Callable[[Any], bool]:
    """Tests that only these fields of an object have a value."""
    return lambda value: isinstance(value, dict) and all(name in names or not nested for name, nested in value.items())


APPLIED, NO_EFFECT, NEVER = Rule("applied"), Rule("no effect"), one_of()
# Accepted values are the values that the compiler and the services use anyway.
REPORTED = Rule("reported", lambda value: value in ("cosine", "maxsim", "meanmaxsim", "right"))

# Fields that all configurations of transformers share. The code of a model, which is compiled, reads its other fields.
CONFIG: Rules = _table(
    # Labels, heads and ids of tokens, which transformers or the compiler applies.
    Fields(APPLIED, ("architectures", "model_type", "id2label", "label2id", "num_labels", "_num_labels")),
    Fields(APPLIED, ("task_specific_params", "prefix", "is_encoder_decoder", "is_decoder", "add_cross_attention")),
    Fields(APPLIED, ("cross_attention_hidden_size", "tie_encoder_decoder", "tie_word_embeddings", "bos_token_id")),
    Fields(APPLIED, ("pad_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id", "dtype", "torch_dtype")),
    Fields(APPLIED, ("tokenizer_class", "sentence_transformers", "sbert_ce_default_activation_function", "auto_map")),
    Fields(APPLIED, ("quantization_config", "per_layer_config", "rope_scaling", "rope_theta", "rope_parameters")),
    Fields(APPLIED, ("layer_types", "is_causal", "use_bidirectional_attention")),
    # Outputs beside results, ways to compute the same, training, and notes.
    Fields(NO_EFFECT, ("transformers_version", "output_hidden_states", "output_attentions", "return_dict")),
    Fields(NO_EFFECT, ("use_return_dict", "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward")),
    Fields(NO_EFFECT, ("finetuning_task", "gradient_checkpointing", "use_cache", "attn_implementation")),
    Fields(NO_EFFECT, ("_attn_implementation", "_attn_implementation_internal", "experts_implementation")),
    Fields(NO_EFFECT, ("_experts_implementation", "_experts_implementation_internal", "name_or_path", "_name_or_path")),
    Fields(NO_EFFECT, ("_commit_hash", "keys_to_ignore_at_inference", "language_model", "cls_token_id")),
    Fields(one_of("regression", "single_label_classification", "multi_label_classification"), ("problem_type",)),
    Fields(one_of({}), ("pruned_heads",)),
)

# Fields of published files that the code of transformers does not read, or no longer reads, with the values that match
# its computation: for all kinds of models, and for one kind. A kind that declares such a field has no such rule for it.
_UNREAD: Rules = _table(
    Fields(NO_EFFECT, ("output_past", "save_step", "language", "transformers.js_config", "is_llama_config")),
    Fields(NO_EFFECT, ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")),
    Fields(one_of("bidi"), ("directionality",)),
    Fields(one_of("first_token_transform"), ("pooler_type",)),
    Fields(one_of("absolute"), ("position_embedding_type",)),
)
_UNREAD_OF_KIND: Mapping[str, Rules] = {
    "albert": _table(
        Fields(one_of(1), ("down_scale_factor",)),
        Fields(one_of(0), ("gap_size", "net_structure_type", "num_memory_blocks")),
    ),
    "bart": _table(Fields(one_of(2), ("extra_pos_embeddings",)), Fields(one_of(True), ("normalize_embedding",))),
    "distilbert": _table(Fields(one_of(True), ("tie_weights_",))),
    "gpt2": _table(Fields(NO_EFFECT, ("n_ctx",))),
    "longformer": _table(Fields(one_of("longformer"), ("attention_mode",))),
    "mbart": _table(Fields(one_of(True), ("normalize_embedding", "add_final_layer_norm", "normalize_before"))),
    "pegasus": _table(Fields(one_of(True), ("static_position_embeddings", "add_final_layer_norm", "normalize_before"))),
    "marian": _table(Fields(one_of(True), ("static_position_embeddings",))),
    "modernbert": _table(Fields(NO_EFFECT, ("position_embedding_type", "layer_norm_eps", "reference_compile"))),
    "t5": _table(Fields(NO_EFFECT, ("n_positions",))),
}

_SAME_CACHES = one_of("dynamic", "dynamic_full", "static", "hybrid", "sliding_window", "offloaded")
# Fields of generation_config.json: further outputs of `generate`, its cache, and guesses of tokens, which do not change
# the text; and ids that other files contain as well.
GENERATION_CONFIG: Rules = _table(
    Fields(APPLIED, tuple(GenerationFacts.model_fields)),
    Fields(APPLIED, ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")),
    Fields(APPLIED, ("force_bos_token_to_be_generated",)),
    Fields(NO_EFFECT, ("transformers_version", "_from_model_config", "_commit_hash", "output_attentions")),
    Fields(NO_EFFECT, ("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate")),
    Fields(NO_EFFECT, ("use_cache", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size")),
    Fields(NO_EFFECT, ("compile_config", "disable_compile", "continuous_batching_config", "return_legacy_cache")),
    Fields(NO_EFFECT, ("use_mtp", "speculation_type", "is_assistant", "num_assistant_tokens")),
    Fields(NO_EFFECT, ("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens")),
    Fields(NO_EFFECT, ("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind")),
    Fields(NO_EFFECT, ("assistant_ensemble_weight",)),
    Fields(NEVER, ("max_time", "top_h", "watermarking_config", "penalty_alpha", "dola_layers", "constraints")),
    Fields(NEVER, ("force_words_ids",)),
    Fields(one_of(1), ("num_return_sequences", "num_beam_groups")),
    Fields(one_of(0.0), ("diversity_penalty", "epsilon_cutoff", "eta_cutoff")),
    Fields(one_of(1.0), ("encoder_repetition_penalty", "typical_p", "guidance_scale")),
    Fields(one_of(False), ("remove_invalid_values", "token_healing")),
    Fields(one_of([]), ("stop_strings",)),
    # All caches except the quantized cache contain the same numbers.
    Fields(_SAME_CACHES, ("cache_implementation",)),
)

# Fields of tokenizer_config.json. The tokenizer that transformers makes of it becomes the bundle's tokenizer.
TOKENIZER_CONFIG: Rules = _table(
    Fields(APPLIED, ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")),
    Fields(APPLIED, ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")),
    Fields(APPLIED, ("added_tokens_decoder", "add_bos_token", "add_eos_token", "add_prefix_space", "auto_map")),
    Fields(APPLIED, ("clean_text", "do_basic_tokenize", "do_lower_case", "do_split_on_punc", "split_by_punct")),
    Fields(APPLIED, ("extra_ids", "offset", "keep_accents", "legacy", "legacy_behaviour", "never_split")),
    Fields(APPLIED, ("normalization", "remove_space", "separate_vocabs", "source_lang", "target_lang")),
    Fields(APPLIED, ("sp_model_kwargs", "src_lang", "tgt_lang", "language_codes", "strip_accents")),
    Fields(APPLIED, ("tokenize_chinese_chars", "tokenizer_type", "trim_offsets", "num_madeup_words", "suffix_first")),
    Fields(APPLIED, ("from_slow", "vocab_size", "unk_id", "wordpieces_prefix", "tokenizer_file")),
    Fields(APPLIED, ("fast_tokenizer_files", "vocab_file", "merges_file", "vocab", "merges", "fix_mistral_regex")),
    Fields(APPLIED, ("mask_token_sent", "spm_file", "source_spm", "target_spm", "target_vocab_file", "vocab_list")),
    Fields(APPLIED, ("preserve_case", "do_lowercase_and_remove_accent", "id2lang", "lang2id", "eot_token")),
    Fields(APPLIED, ("fill_token", "middle_token", "prefix_token", "suffix_token", "post_processor", "init_inputs")),
    Fields(APPLIED, ("sep_token_id", "cls_token_id", "pad_token_id", "chat_control_tokens")),
    # Fields for the library's calls and files, for decoding, and for options of requests; padding is at the right.
    Fields(NO_EFFECT, ("name_or_path", "backend", "processor_class", "special_tokens_map_file", "is_local")),
    Fields(NO_EFFECT, ("local_files_only", "files_loaded", "verbose", "padding_side", "padding", "tokenizer")),
    Fields(NO_EFFECT, ("tokenizer_padding", "tokenizer_truncation", "pad_to_multiple_of", "pad_token_type_id")),
    Fields(NO_EFFECT, ("max_length", "stride", "truncation", "truncation_strategy", "return_token_type_ids")),
    Fields(NO_EFFECT, ("return_attention_mask", "return_tensors", "errors", "use_fast", "use_fast_bert_tokenizer")),
    Fields(NO_EFFECT, ("device_map", "response_schema", "response_template", "clean_up_tokenization_spaces")),
    Fields(NO_EFFECT, ("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",)),
    Fields(NO_EFFECT, ("spaces_between_special_tokens", "trust_remote_code", "use_default_system_prompt")),
    Fields(NO_EFFECT, ("split_special_tokens",)),  # special tokens in texts are always text
    # transformers writes a large number, 1e30, if there is no limit.
    Fields(limited(lambda value: isinstance(value, int | float) and value >= 1), ("model_max_length", "max_len")),
    Fields(limited(lambda value: isinstance(value, str | list | dict)), ("chat_template",)),
    Fields(limited(lambda value: isinstance(value, str)), ("tokenizer_class",)),
    Fields(limited(lambda value: isinstance(value, list) and "input_ids" in value), ("model_input_names",)),
    Fields(REPORTED, ("truncation_side",)),  # requests set the side
)
SPECIAL_TOKENS_MAP: Rules = _table(
    Fields(APPLIED, ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")),
    Fields(APPLIED, ("additional_special_tokens", "extra_special_tokens")),
)
# Fields of tokenizer.json, and of its model. The library `tokenizers` reads the file, here and in the services.
TOKENIZER: Rules = _table(
    Fields(APPLIED, ("version", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")),
    Fields(NO_EFFECT, ("truncation", "padding")),  # set for each call, as in transformers
)
TOKENIZER_MODEL: Rules = _table(
    Fields(APPLIED, ("type", "vocab", "merges", "unk_token", "unk_id", "continuing_subword_prefix")),
    Fields(APPLIED, ("end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges", "max_input_chars_per_word")),
    Fields(one_of(0, 0.0), ("dropout", "alpha")),  # dropout drops merges by chance
    Fields(one_of(0, 1), ("nbest_size",)),
)

_HUB_ARGUMENTS = (
    *("cache_dir", "device_map", "local_files_only", "low_cpu_mem_usage", "revision", "subfolder", "token"),
    "trust_remote_code",
)
_MODEL_ARGUMENTS = limited(
    _only(*_HUB_ARGUMENTS, "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_safetensors")
)
_TOKENIZER_ARGUMENTS = limited(_only(*_HUB_ARGUMENTS, "use_fast", "padding_side"))
_CONFIG_ARGUMENTS = limited(_only(*_HUB_ARGUMENTS, "use_cache"))
_CLASSIFIES, _EMBEDS = one_of("sequence-classification"), one_of("feature-extraction")
_TRANSFORMER_TASKS: Rules = {
    "rerank": one_of("sequence-classification", "text-generation", "feature-extraction"),
    **dict.fromkeys(("text_classification", "zero_shot_classification"), _CLASSIFIES),
    "sparse_embedding": one_of("fill-mask"),
    **dict.fromkeys(("sentence_embedding", "sentence_similarity", "multi_vector_embedding"), _EMBEDS),
}


def _is_plain_text(value: Any) -> bool:
    """Whether a modality_config makes the model's forward read texts, and which of its outputs is used."""
    text = value.get("text", {}) if isinstance(value, dict) else {}
    outputs = (None, "last_hidden_state", "logits")
    return text.get("method", "forward") == "forward" and text.get("method_output_name") in outputs


def _is_of_templates(value: Any) -> bool:
    """Whether processing_kwargs are for chat templates alone, which rerankers have."""
    is_for_model = _only("logits_to_keep")
    return isinstance(value, dict) and all(
        name == "chat_template" or is_for_model(arguments) for name, arguments in value.items()
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value is not True


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(text is None or isinstance(text, str) for text in value.values())


# Fields of sentence_bert_config.json of a Transformer module.
TRANSFORMER: Rules = _table(
    Fields(APPLIED, ("transformer_task", "do_lower_case", "query_expansion")),
    Fields(limited(_is_count), ("max_seq_length", "query_length", "document_length")),
    Fields(NO_EFFECT, ("unpad_inputs", "backend")),
    Fields(limited(_is_plain_text), ("modality_config",)),
    Fields(one_of("token_embeddings", "scores", "causal_logits"), ("module_output_name",)),
    Fields(limited(_is_of_templates), ("processing_kwargs",)),
    Fields(NEVER, ("tokenizer_name_or_path",)),
    Fields(_MODEL_ARGUMENTS, ("model_args", "model_kwargs")),
    Fields(_TOKENIZER_ARGUMENTS, ("tokenizer_args", "processor_kwargs")),
    Fields(_CONFIG_ARGUMENTS, ("config_args", "config_kwargs")),
)
# Fields of config_sentence_transformers.json.
SENTENCE_TRANSFORMERS: Rules = _table(
    Fields(APPLIED, ("model_type", "default_prompt_name", "activation_fn")),
    Fields(limited(_are_texts), ("prompts",)),
    Fields(limited(_is_count), ("truncate_dim", "max_active_dims")),
    # Fields of PyLate.
    Fields(APPLIED, ("query_prefix", "document_prefix", "query_length", "document_length")),
    Fields(APPLIED, ("attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words", "do_query_expansion")),
    Fields(NEVER, ("query_expansion",)),
    # keep_in_fp32_modules: all layers stay in float32.
    Fields(NO_EFFECT, ("__version__", "requirements", "keep_in_fp32_modules")),
    # sentence-similarity computes cosines.
    Fields(REPORTED, ("similarity_fn_name",)),
)
# The same for models of images and texts, whose vectors are compared as they are.
_IMAGE_TEXT_FIELDS: Rules = _table(
    Fields(NEVER, ("truncate_dim", "default_prompt_name")), Fields(limited(_only()), ("prompts",))
)
MODULES: Rules = _table(Fields(APPLIED, ("type", "path")), Fields(NO_EFFECT, ("idx", "name", "kwargs")))
_POOLING_SIZES = Fields(NO_EFFECT, ("embedding_dimension", "word_embedding_dimension"))
# Fields of each module's config.json. Other modules are refused.
MODULE: Mapping[str, Rules] = {
    "Pooling": _table(
        Fields(APPLIED, ("pooling_mode", "include_prompt", "pooling_mode_cls_token", "pooling_mode_max_tokens")),
        Fields(APPLIED, ("pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens")),
        Fields(APPLIED, ("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken")),
        _POOLING_SIZES,
    ),
    "Dense": _table(
        Fields(APPLIED, ("in_features", "out_features", "bias", "activation_function", "module_input_name")),
        Fields(APPLIED, ("module_output_name", "use_residual")),
    ),
    "Normalize": _table(Fields(APPLIED, ("module_input_name", "module_output_name"))),
    "LayerNorm": _table(Fields(APPLIED, ("dimension",))),
    "Dropout": _table(Fields(NO_EFFECT, ("dropout",))),
    "SpladePooling": _table(
        Fields(APPLIED, ("pooling_strategy", "activation_function")), _POOLING_SIZES, Fields(NO_EFFECT, ("chunk_size",))
    ),
    "LogitScore": _table(
        Fields(APPLIED, ("true_token_id", "false_token_id")), Fields(one_of("causal_logits"), ("module_input_name",))
    ),
    "MultiVectorMask": _table(
        Fields(APPLIED, ("skiplist_words", "skiplist_tasks")), Fields(one_of([]), ("keep_only_token_ids",))
    ),
}

# Fields of preprocessor_config.json. The processor's pixels of sample images are compared with its options.
IMAGE_PROCESSOR: Rules = _table(
    Fields(APPLIED, ("image_processor_type", "feature_extractor_type", "do_convert_rgb", "do_resize", "size")),
    Fields(APPLIED, ("default_to_square", "crop_size", "resample", "do_rescale", "rescale_factor", "do_normalize")),
    Fields(APPLIED, ("image_mean", "image_std", "do_pad", "pad_size", "do_center_crop", "crop_pct")),
    Fields(APPLIED, ("do_flip_channel_order", "do_reduce_labels", "do_thumbnail", "do_align_long_axis")),
    Fields(APPLIED, ("rescale_offset", "include_top", "size_divisor")),
    Fields(NO_EFFECT, ("processor_class", "data_format", "input_data_format", "device", "return_tensors")),
    Fields(NO_EFFECT, ("disable_grouping", "image_seq_length", "backend", "auto_map", "num_channels", "patch_size")),
)

# Fields of adapter_config.json. peft applies them to the weights, into which the adapter is merged.
ADAPTER: Rules = _table(
    Fields(APPLIED, ("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "r")),
    Fields(APPLIED, ("target_modules", "exclude_modules", "lora_alpha", "fan_in_fan_out", "bias", "use_rslora")),
    Fields(APPLIED, ("modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern")),
    Fields(APPLIED, ("alpha_pattern", "trainable_token_indices", "use_dora", "layer_replication", "lora_bias")),
    Fields(APPLIED, ("target_parameters", "ensure_weight_tying", "use_qalora", "qalora_group_size")),
    # Fields of training, and of the initialization of adapters before it.
    Fields(NO_EFFECT, ("peft_version", "inference_mode", "lora_dropout", "megatron_config", "megatron_core")),
    Fields(NO_EFFECT, ("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config")),
    Fields(NO_EFFECT, ("runtime_config", "kasa_config")),
    # These act on some tokens or inputs only, or by chance, so no merged weights are the same.
    Fields(NEVER, ("alora_invocation_tokens", "arrow_config", "use_bdlora", "monteclora_config")),
)

# Names of fields that change no numbers.
_NOTES = re.compile(r"^_|version|name|author|license|dropout|comment|_path$|_dir$|_lr|learning|train|loss|seed|device")
_TOKEN = re.compile("_token$")
_BY_NAME = re.compile(r'(?:getattr\((?:self\.)?config, |\bkwargs\.(?:get|pop)\()\s*"(\w+)"')
_SHOWN, _SHOWN_CHARACTERS = 6, 60


def check_settings(folder: Path, config: Any, task: str) -> list[str]:
    """Lines about unknown fields, for a user. Raises SetupError, which names an unsupported field and its value."""
    return [line for path, rules, content in _files(folder, config, task) if (line := _check(path, rules, content))]


def check_adapter(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises SetupError for a LoRA adapter with an unsupported field."""
    if settings.get("peft_type") in (None, "LORA"):
        _check(path, ADAPTER, settings)


def _files(folder: Path, config: Any, task: str) -> Iterator[tuple[Path, Rules, Mapping[str, Any]]]:
    """Each file that a task reads, with its rules and its content."""
    own = transformer_folder(folder)
    unread = {**_UNREAD, **_UNREAD_OF_KIND.get(config.model_type, {})}
    read = [*_fields(type(config)), *_read_by_name(type(config)), *GENERATION_CONFIG]
    known = {**unread, **dict.fromkeys(read, APPLIED), **CONFIG}
    paths: list[tuple[Path, Rules]] = [(own / "config.json", known)]
    if TASKS[task].generates:
        # unsupported_generation checks the values as transformers reads them, also from config.json.
        paths.append((own / "generation_config.json", dict.fromkeys(GENERATION_CONFIG, APPLIED)))
    if TASKS[task].reads != "images":
        paths.append((own / "tokenizer_config.json", TOKENIZER_CONFIG))
        paths.append((own / "special_tokens_map.json", SPECIAL_TOKENS_MAP))
        paths.append((own / "tokenizer.json", TOKENIZER))
    if TASKS[task].reads != "texts":
        paths.append((own / "preprocessor_config.json", IMAGE_PROCESSOR))
    image_text_fields = _IMAGE_TEXT_FIELDS if TASKS[task].reads == "both" else {}
    paths.append((folder / CONFIGURATION, {**SENTENCE_TRANSFORMERS, **image_text_fields}))
    for kind, path in read_modules(folder):
        if kind in MODULE and path != folder:
            paths.append((path / "config.json", MODULE[kind]))
    if (limits := limits_file(own)) is not None:
        paths.append((limits, {**TRANSFORMER, "transformer_task": _TRANSFORMER_TASKS.get(task, NO_EFFECT)}))
    for path, rules in paths:
        # own_code.py checks the rewritten configuration of a known kind, whose names are from its author's code.
        if not path.is_file() or (path.name == "config.json" and path.parent.name == KNOWN_FORM):
            continue
        content = read_object(path)
        yield path, rules, content
        if rules is TOKENIZER and isinstance(content.get("model"), dict):
            yield path, TOKENIZER_MODEL, content["model"]


def _fields(kind: Any) -> Iterable[str]:
    """The fields of a class of configurations, their other names, and the fields that it adds itself."""
    attributes_of_classes = (vars(base) for base in kind.__mro__)
    return {
        *(name for attributes in attributes_of_classes for name in attributes.get("__annotations__", ())),
        *(() if getattr(kind, "has_no_defaults_at_init", False) else vars(kind())),
        *_parameters(kind),
        *getattr(kind, "attribute_map", ()),
        *getattr(kind, "sub_configs", ()),
    }


def _read_by_name(kind: Any) -> Iterator[str]:
    """The fields that the code of a kind of models reads by their names, without declaring them."""
    folder = Path(inspect.getfile(kind)).parent
    for path in (*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")):
        yield from _BY_NAME.findall(path.read_text(encoding="utf-8"))


def _parameters(kind: Any) -> Sequence[str]:
    code = getattr(kind.__init__, "__wrapped__", kind.__init__).__code__
    names: Sequence[str] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def _check(path: Path, rules: Rules, content: Mapping[str, Any]) -> str:
    unknown = []
    for name, value in content.items():
        if value is None:
            continue
        rule = rules.get(name)
        if rule is None:
            unknown += [] if _says_nothing(name, value, rules) else [name]
        elif rule.effect == "reported":
            unknown += [] if rule.accepts(value) else [name]
        elif not rule.accepts(value):
            shown = repr(value)
            shown = shown if len(shown) < _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "…"
            raise SetupError(
                f"{path}: sets {name} to {shown}, which is not supported; take it out there if the model does without"
            )
    if not unknown:
        return ""
    names = ", ".join(sorted(unknown)[:_SHOWN]) + (", …" if len(unknown) > _SHOWN else "")
    return f"      {'not applied':14}{names} of {path.name}: compare results if the model needs it"


def _says_nothing(name: str, value: Any, rules: Rules) -> bool:
    is_token = rules in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP) and _TOKEN.search(name)
    return bool(is_token or _NOTES.search(name) or value in ("", [], {}) or value is False)


def unsupported_generation(config: Any) -> tuple[str, object] | None:
    """The first field of a generation_config that changes the results of `generate` and is not applied."""
    for name in sorted({*transformers.GenerationConfig().to_dict(), *GENERATION_CONFIG}):
        rule, value = GENERATION_CONFIG.get(name, NEVER), getattr(config, name, None)
        if value is not None and not rule.accepts(value):
            return name, value
    return None
