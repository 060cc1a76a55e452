"""Every field that the files of a model can hold, and what becomes of it.

A field is applied, here or by the library that loads the file; or without effect on results; or refused by its name
unless its value changes nothing. One that is none of these is told to the user. null means that a field is not given.
tests/contract/test_saved_settings.py compares the tables with the sources of the libraries.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

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

# "applied", "no effect", "told"; the only values that are supported, besides null; or a test of the value.
Rule: TypeAlias = str | tuple[object, ...] | Callable[[Any], bool]
Rules: TypeAlias = Mapping[str, Rule]

APPLIED, NO_EFFECT, TOLD = "applied", "no effect", "told"


def _all(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _only(names: str) -> Callable[[Any], bool]:
    """Whether an object has no other names with a value than these."""
    known = set(names.split())
    return lambda value: isinstance(value, dict) and all(name in known or not one for name, one in value.items())


_OF_HUB = "cache_dir device_map local_files_only low_cpu_mem_usage revision subfolder token trust_remote_code"

# What all configurations of transformers share. Those of a kind of model are read by its own code, which is compiled.
CONFIG: Rules = {
    **_all(
        APPLIED,
        # By transformers or by us: labels, heads, ids of tokens.
        "architectures model_type id2label label2id num_labels _num_labels task_specific_params prefix "
        "is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder "
        "tie_word_embeddings bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id dtype "
        "torch_dtype tokenizer_class sentence_transformers sbert_ce_default_activation_function auto_map "
        "quantization_config per_layer_config rope_scaling rope_theta rope_parameters layer_types is_causal "
        "use_bidirectional_attention",
    ),
    **_all(
        NO_EFFECT,
        # What is returned beside results, how it is computed, training, and notes.
        "transformers_version output_hidden_states output_attentions return_dict use_return_dict torchscript "
        "use_bfloat16 tf_legacy_loss chunk_size_feed_forward finetuning_task gradient_checkpointing use_cache "
        "attn_implementation _attn_implementation _attn_implementation_internal experts_implementation "
        "_experts_implementation _experts_implementation_internal name_or_path _name_or_path _commit_hash "
        "keys_to_ignore_at_inference language_model cls_token_id",
    ),
    "problem_type": ("regression", "single_label_classification", "multi_label_classification"),
    "pruned_heads": ({},),
}

# Of generation_config.json: what `generate` returns beside tokens, how its cache is kept, and how tokens are guessed
# ahead, which leaves the text as it is; and ids that are found elsewhere.
GENERATION_CONFIG: Rules = {
    **dict.fromkeys(GenerationFacts.model_fields, APPLIED),
    **_all(APPLIED, "bos_token_id pad_token_id eos_token_id decoder_start_token_id force_bos_token_to_be_generated"),
    **_all(
        NO_EFFECT,
        "transformers_version _from_model_config _commit_hash output_attentions output_hidden_states output_scores "
        "output_logits return_dict_in_generate use_cache cache_config max_cache_len low_memory prefill_chunk_size "
        "compile_config disable_compile continuous_batching_config return_legacy_cache use_mtp speculation_type "
        "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind "
        "assistant_ensemble_weight",
    ),
    **_all((), "max_time top_h watermarking_config penalty_alpha dola_layers constraints force_words_ids"),
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

# Of tokenizer_config.json. The tokenizer that transformers makes of it becomes the bundle's.
TOKENIZER_CONFIG: Rules = {
    **_all(
        APPLIED,
        "bos_token eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens "
        "extra_special_tokens model_specific_special_tokens added_tokens_decoder add_bos_token add_eos_token "
        "add_prefix_space auto_map clean_text do_basic_tokenize do_lower_case do_split_on_punc "
        "split_by_punct extra_ids offset keep_accents legacy legacy_behaviour "
        "never_split normalization remove_space separate_vocabs source_lang target_lang sp_model_kwargs "
        "src_lang tgt_lang language_codes strip_accents tokenize_chinese_chars tokenizer_type "
        "trim_offsets num_madeup_words suffix_first from_slow vocab_size unk_id wordpieces_prefix tokenizer_file "
        "fast_tokenizer_files vocab_file merges_file vocab merges fix_mistral_regex mask_token_sent spm_file "
        "source_spm target_spm target_vocab_file "
        "vocab_list preserve_case do_lowercase_and_remove_accent id2lang lang2id eot_token fill_token middle_token "
        "prefix_token suffix_token post_processor init_inputs "
        "sep_token_id cls_token_id pad_token_id chat_control_tokens",
    ),
    **_all(
        NO_EFFECT,
        # Of the library's calls and files, of decoding, and of what requests say themselves; padding is at the right.
        "name_or_path backend processor_class special_tokens_map_file is_local local_files_only files_loaded verbose "
        "padding_side padding tokenizer tokenizer_padding tokenizer_truncation "
        "pad_to_multiple_of pad_token_type_id max_length stride truncation truncation_strategy "
        "return_token_type_ids return_attention_mask return_tensors errors use_fast use_fast_bert_tokenizer device_map "
        "response_schema response_template clean_up_tokenization_spaces "
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output spaces_between_special_tokens "
        # Special tokens in texts are text, whatever it says.
        "split_special_tokens trust_remote_code use_default_system_prompt",
    ),
    # A large number, as transformers writes it (1e30), is none.
    **_all(lambda value: isinstance(value, int | float) and value >= 1, "model_max_length max_len"),
    "chat_template": lambda value: isinstance(value, str | list | dict),
    "tokenizer_class": lambda value: isinstance(value, str),
    "model_input_names": lambda value: isinstance(value, list) and "input_ids" in value,
    "truncation_side": TOLD,  # requests say at which side they are cut
}
SPECIAL_TOKENS_MAP: Rules = {
    **_all(
        APPLIED,
        "bos_token eos_token unk_token sep_token pad_token cls_token mask_token additional_special_tokens "
        "extra_special_tokens",
    )
}
# Of tokenizer.json, and of its model. The library `tokenizers` reads it, here and where it serves.
TOKENIZER: Rules = {
    **_all(APPLIED, "version added_tokens normalizer pre_tokenizer post_processor decoder model"),
    **_all(NO_EFFECT, "truncation padding"),  # of each call, as in transformers
}
TOKENIZER_MODEL: Rules = {
    **_all(
        APPLIED,
        "type vocab merges unk_token unk_id continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback "
        "ignore_merges max_input_chars_per_word",
    ),
    "dropout": (0, 0.0),  # drops merges by chance
    "alpha": (0, 0.0),
    "nbest_size": (0, 1),
}

_ARGUMENTS_OF_MODEL = _only(f"{_OF_HUB} torch_dtype dtype attn_implementation add_pooling_layer use_safetensors")
_ARGUMENTS_OF_TOKENIZER = _only(f"{_OF_HUB} use_fast padding_side")
_ARGUMENTS_OF_CONFIG = _only(f"{_OF_HUB} use_cache")
_TRANSFORMER_TASKS = {
    "rerank": ("sequence-classification", "text-generation", "feature-extraction"),
    "text_classification": ("sequence-classification",),
    "zero_shot_classification": ("sequence-classification",),
    "sparse_embedding": ("fill-mask",),
    "sentence_embedding": ("feature-extraction",),
    "sentence_similarity": ("feature-extraction",),
    "multi_vector_embedding": ("feature-extraction",),
}


def _is_plain_text(value: Any) -> bool:
    """Of modality_config: that texts are what the model's forward reads, and which of its outputs goes on."""
    text = value.get("text", {}) if isinstance(value, dict) else {}
    outputs = (None, "last_hidden_state", "logits")
    return text.get("method", "forward") == "forward" and text.get("method_output_name") in outputs


def _is_of_templates(value: Any) -> bool:
    """Of processing_kwargs: that they are of chat templates alone, which rerankers have."""
    of_model = _only("logits_to_keep")
    return isinstance(value, dict) and all(name == "chat_template" or of_model(one) for name, one in value.items())


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value is not True


def _are_texts(value: Any) -> bool:
    """Whether an object has texts alone, or null."""
    return isinstance(value, dict) and all(one is None or isinstance(one, str) for one in value.values())


# Of sentence_bert_config.json, of a Transformer module.
TRANSFORMER: Rules = {
    **_all(APPLIED, "transformer_task do_lower_case query_expansion"),
    **_all(_is_count, "max_seq_length query_length document_length"),
    **_all(NO_EFFECT, "unpad_inputs backend"),
    "modality_config": _is_plain_text,
    "module_output_name": ("token_embeddings", "scores", "causal_logits"),
    "processing_kwargs": _is_of_templates,
    "tokenizer_name_or_path": (),
    **_all(_ARGUMENTS_OF_MODEL, "model_args model_kwargs"),
    **_all(_ARGUMENTS_OF_TOKENIZER, "tokenizer_args processor_kwargs"),
    **_all(_ARGUMENTS_OF_CONFIG, "config_args config_kwargs"),
}
# Of config_sentence_transformers.json.
SENTENCE_TRANSFORMERS: Rules = {
    **_all(APPLIED, "model_type default_prompt_name activation_fn"),
    "prompts": _are_texts,
    **_all(_is_count, "truncate_dim max_active_dims"),
    # Of PyLate.
    **_all(
        APPLIED,
        "query_prefix document_prefix query_length document_length attend_to_expansion_tokens attend_to_mask_tokens "
        "skiplist_words do_query_expansion",
    ),
    "query_expansion": (),
    # keep_in_fp32_modules: with float32 all layers are.
    **_all(NO_EFFECT, "__version__ requirements keep_in_fp32_modules"),
    # sentence-similarity has cosines.
    "similarity_fn_name": TOLD,
}
# Of models of images and texts, whose vectors are compared as they are.
_OF_BOTH: Rules = {"truncate_dim": (), "default_prompt_name": (), "prompts": _only("")}
MODULES: Rules = _all(APPLIED, "type path") | _all(NO_EFFECT, "idx name kwargs")
# Of the modules' own config.json. Other modules are refused.
MODULE: Mapping[str, Rules] = {
    "Pooling": _all(
        APPLIED,
        "pooling_mode include_prompt pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens "
        "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken",
    )
    | _all(NO_EFFECT, "embedding_dimension word_embedding_dimension"),
    "Dense": _all(
        APPLIED,
        "in_features out_features bias activation_function module_input_name module_output_name use_residual",
    ),
    "Normalize": _all(APPLIED, "module_input_name module_output_name"),
    "LayerNorm": _all(APPLIED, "dimension"),
    "Dropout": _all(NO_EFFECT, "dropout"),
    "SpladePooling": _all(APPLIED, "pooling_strategy activation_function")
    | _all(NO_EFFECT, "embedding_dimension word_embedding_dimension chunk_size"),
    "LogitScore": {**_all(APPLIED, "true_token_id false_token_id"), "module_input_name": ("causal_logits",)},
    "MultiVectorMask": {**_all(APPLIED, "skiplist_words skiplist_tasks"), "keep_only_token_ids": ([],)},
}

# Of preprocessor_config.json. What the processor makes of sample images is compared with what its options say.
IMAGE_PROCESSOR: Rules = {
    **_all(
        APPLIED,
        "image_processor_type feature_extractor_type do_convert_rgb do_resize size default_to_square crop_size "
        "resample do_rescale rescale_factor do_normalize image_mean image_std do_pad pad_size do_center_crop crop_pct "
        "do_flip_channel_order do_reduce_labels do_thumbnail do_align_long_axis rescale_offset include_top "
        "size_divisor",
    ),
    **_all(
        NO_EFFECT,
        "processor_class data_format input_data_format device return_tensors disable_grouping image_seq_length backend "
        "auto_map num_channels patch_size",
    ),
}

# Of adapter_config.json. peft applies what an adapter does to the weights, into which it is merged.
ADAPTER: Rules = {
    **_all(
        APPLIED,
        "peft_type task_type auto_mapping base_model_name_or_path revision r target_modules exclude_modules lora_alpha "
        "fan_in_fan_out bias use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern "
        "rank_pattern alpha_pattern trainable_token_indices use_dora layer_replication lora_bias target_parameters "
        "ensure_weight_tying use_qalora qalora_group_size",
    ),
    **_all(
        NO_EFFECT,
        # Of training, and of how adapters are initialized before it.
        "peft_version inference_mode lora_dropout megatron_config megatron_core loftq_config eva_config corda_config "
        "lora_ga_config velora_config runtime_config kasa_config",
    ),
    # Those work for some tokens or inputs only, or by chance, so that no weights are the same.
    **_all((), "alora_invocation_tokens arrow_config use_bdlora monteclora_config"),
}

# Names of fields that say nothing about numbers.
_NOTES = re.compile(r"^_|version|name|author|license|dropout|comment|_path$|_dir$|_lr|learning|train|loss|seed|device")
_TOKEN = re.compile("_token$")
# Values of fields that are told which are what is done here.
_AS_HERE = ("cosine", "maxsim", "meanmaxsim", "right")
_SHOWN, _SHOWN_CHARACTERS = 6, 60


def check_settings(folder: Path, config: Any, task: str) -> list[str]:
    """Lines about fields that are not known, for a user. Raises SetupError, which names a field that is not supported.

    `config`: the configuration as transformers reads it.
    """
    return [line for path, rules, content in _files(folder, config, task) if (line := _check(path, rules, content))]


def check_adapter(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises SetupError for an adapter of LoRA with a field that is not supported."""
    if settings.get("peft_type") in (None, "LORA"):
        _check(path, ADAPTER, settings)


def _files(folder: Path, config: Any, task: str) -> Iterator[tuple[Path, Rules, Mapping[str, Any]]]:
    """Each file that a task reads, with its rules."""
    own = transformer_folder(folder)
    known = {**dict.fromkeys([*_fields(type(config)), *GENERATION_CONFIG], APPLIED), **CONFIG}
    paths: list[tuple[Path, Rules]] = [(own / "config.json", known)]
    if TASKS[task].generates:
        # Its values are checked as transformers reads them, also from config.json: unsupported_generation.
        paths.append((own / "generation_config.json", dict.fromkeys(GENERATION_CONFIG, APPLIED)))
    if TASKS[task].reads != "images":
        paths.append((own / "tokenizer_config.json", TOKENIZER_CONFIG))
        paths.append((own / "special_tokens_map.json", SPECIAL_TOKENS_MAP))
        paths.append((own / "tokenizer.json", TOKENIZER))
    if TASKS[task].reads != "texts":
        paths.append((own / "preprocessor_config.json", IMAGE_PROCESSOR))
    of_both = _OF_BOTH if TASKS[task].reads == "both" else {}
    paths.append((folder / CONFIGURATION, {**SENTENCE_TRANSFORMERS, **of_both}))
    for kind, path in read_modules(folder):
        if kind in MODULE and path != folder:
            paths.append((path / "config.json", MODULE[kind]))
    if (limits := limits_file(own)) is not None:
        supported = _TRANSFORMER_TASKS.get(task)
        paths.append((limits, {**TRANSFORMER, "transformer_task": supported or NO_EFFECT}))
    for path, rules in paths:
        # What is written anew of a known kind has names of its author's code, of which values are refused there.
        if not path.is_file() or (path.name == "config.json" and path.parent.name == KNOWN_FORM):
            continue
        content = read_object(path)
        yield path, rules, content
        if rules is TOKENIZER and isinstance(content.get("model"), dict):
            yield path, TOKENIZER_MODEL, content["model"]


def _fields(kind: Any) -> Iterable[str]:
    """The fields of a class of configurations, the names that stand for them, and those that it adds itself."""
    of_classes = (vars(one) for one in kind.__mro__)
    return {
        *(name for one in of_classes for name in one.get("__annotations__", ())),
        *(() if getattr(kind, "has_no_defaults_at_init", False) else vars(kind())),
        *_parameters(kind),
        *getattr(kind, "attribute_map", ()),
        *getattr(kind, "sub_configs", ()),
    }


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
        if rule is None or rule == TOLD:
            is_harmless = value in _AS_HERE if rule else _says_nothing(name, value, rules)
            unknown += [] if is_harmless else [name]
        elif not isinstance(rule, str) and not (value in rule if isinstance(rule, tuple) else rule(value)):
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
    """The first field of a generation_config that changes what `generate` returns, and that is not applied."""
    for name in sorted({*transformers.GenerationConfig().to_dict(), *GENERATION_CONFIG}):
        rule, value = GENERATION_CONFIG.get(name, ()), getattr(config, name, None)
        if value is not None and isinstance(rule, tuple) and value not in rule:
            return name, value
    return None
