"""Every field that the files of a model can contain, and its rule, in the tables of saved_settings.json.

A field is applied, here or by the library that loads the file, or it has no effect on results. Otherwise its value is
refused by name unless it changes nothing. Other fields are reported to the user. null means that a field is not given.
tests/contract/test_saved_settings.py compares the tables with the sources of the libraries.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import transformers

from neuronpipe.compiler.own_code import KNOWN_FORM
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import CONFIGURATION, limits_file, read_modules, transformer_folder
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.text_options import GenerationFacts


@dataclass(frozen=True, slots=True)
class Rule:
    """The effect of a field. A value that `accepts` does not accept is reported or, for other effects, refused."""

    effect: Literal["applied", "no effect", "reported"]
    accepts: Callable[[Any], bool] = lambda value: True


# The rule of each field by its name.
Rules: TypeAlias = Mapping[str, Rule]


def limited(accepts: Callable[[Any], bool]) -> Rule:
    """Makes the rule of a field that is applied, with values that pass a test."""
    return Rule("applied", accepts)


def one_of(*values: object) -> Rule:
    """Makes the rule of a field that is applied, or changes nothing, with these values only."""
    return limited(lambda value: value in values)


def _only(*names: str) -> Callable[[Any], bool]:
    """Tests that only these fields of an object have a value."""
    return lambda value: isinstance(value, dict) and all(name in names or not nested for name, nested in value.items())


def _is_plain_text(value: Any) -> bool:
    """Returns whether a modality_config makes the model's forward read texts and give its vectors or logits."""
    text = value.get("text", {}) if isinstance(value, dict) else {}
    outputs = (None, "last_hidden_state", "logits")
    return text.get("method", "forward") == "forward" and text.get("method_output_name") in outputs


def _is_of_features(value: Any) -> bool:
    """Returns whether a modality_config gives the vectors of texts and images into which CLIP and SigLIP project."""
    methods = {"text": "get_text_features", "image": "get_image_features"}
    return isinstance(value, dict) and all(value.get(name, {}).get("method") == methods[name] for name in methods)


def _is_of_templates(value: Any) -> bool:
    """Returns whether processing_kwargs set nothing but chat templates and logits_to_keep, as rerankers do."""
    is_for_model = _only("logits_to_keep")
    return isinstance(value, dict) and all(
        name == "chat_template" or is_for_model(arguments) for name, arguments in value.items()
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0 and value is not True


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(text is None or isinstance(text, str) for text in value.values())


_HUB_ARGUMENTS = (
    *("cache_dir", "device_map", "local_files_only", "low_cpu_mem_usage", "revision", "subfolder", "token"),
    "trust_remote_code",
)
_MODEL_ARGUMENTS = limited(
    _only(*_HUB_ARGUMENTS, "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer", "use_safetensors")
)
_TOKENIZER_ARGUMENTS = limited(_only(*_HUB_ARGUMENTS, "use_fast", "padding_side"))
_CONFIG_ARGUMENTS = limited(_only(*_HUB_ARGUMENTS, "use_cache"))
APPLIED, NO_EFFECT, NEVER = Rule("applied"), Rule("no effect"), one_of()
# Accepted values are the values that the compiler and the services use anyway.
REPORTED = Rule("reported", lambda value: str(value).lower() in ("cosine", "maxsim", "meanmaxsim", "right"))
_RULES = {"applied": APPLIED, "no effect": NO_EFFECT, "never": NEVER, "reported": REPORTED}
_TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def _table(name: str, **further: Rule) -> Rules:
    """Returns the rules of a table in saved_settings.json, by field, and further rules."""
    table = {field: _RULES[effect] for effect, fields in _TABLES[name].items() if effect != "only" for field in fields}
    for row in _TABLES[name].get("only", ()):
        table |= dict.fromkeys(row["fields"], one_of(*row["values"]))
    return table | further


# Fields that all configurations of transformers share. The code of a model, which is compiled, reads its other fields.
CONFIG = _table("config")
# Fields of published files that the code of transformers does not read, or no longer reads, with the values that match
# its computation: for all kinds of models, and for one kind. A kind that declares such a field has no such rule for it.
_UNREAD = _table("unread")
_UNREAD_OF_KIND = {name.removeprefix("unread of "): _table(name) for name in _TABLES if name.startswith("unread of ")}
# Fields of generation_config.json: further outputs of `generate`, its cache, and guesses of tokens, which do not change
# the text; and ids that other files contain as well. All caches except the quantized cache contain the same numbers.
GENERATION_CONFIG = {**dict.fromkeys(GenerationFacts.model_fields, APPLIED), **_table("generation_config")}
# Fields of tokenizer_config.json. The tokenizer that transformers makes of it becomes the bundle's tokenizer. Special
# tokens in texts are always text, requests set the side of truncation, and padding is at the right.
TOKENIZER_CONFIG = _table(
    "tokenizer_config",
    # transformers writes a large number, 1e30, if there is no limit.
    **dict.fromkeys(
        ("model_max_length", "max_len"), limited(lambda value: isinstance(value, int | float) and value >= 1)
    ),
    chat_template=limited(lambda value: isinstance(value, str | list | dict)),
    tokenizer_class=limited(lambda value: isinstance(value, str)),
    model_input_names=limited(lambda value: isinstance(value, list) and "input_ids" in value),
)
SPECIAL_TOKENS_MAP = _table("special_tokens_map")
# Fields of tokenizer.json, and of its model. The library `tokenizers` reads the file, here and in the services.
TOKENIZER = _table("tokenizer")
TOKENIZER_MODEL = _table("tokenizer_model")
# Fields of sentence_bert_config.json of a Transformer module.
TRANSFORMER = _table(
    "transformer",
    **dict.fromkeys(("max_seq_length", "query_length", "document_length"), limited(_is_count)),
    **dict.fromkeys(("model_args", "model_kwargs"), _MODEL_ARGUMENTS),
    **dict.fromkeys(("tokenizer_args", "processor_kwargs"), _TOKENIZER_ARGUMENTS),
    **dict.fromkeys(("config_args", "config_kwargs"), _CONFIG_ARGUMENTS),
    modality_config=limited(_is_plain_text),
    processing_kwargs=limited(_is_of_templates),
)
_CLASSIFIES, _EMBEDS = one_of("sequence-classification"), one_of("feature-extraction")
_TRANSFORMER_TASKS: Rules = {
    "rerank": one_of("sequence-classification", "text-generation", "feature-extraction"),
    **dict.fromkeys(("text_classification", "zero_shot_classification"), _CLASSIFIES),
    "sparse_embedding": one_of("fill-mask"),
    **dict.fromkeys(("sentence_embedding", "sentence_similarity", "multi_vector_embedding"), _EMBEDS),
}
# Fields of config_sentence_transformers.json, with the fields of PyLate. sentence-similarity computes cosines.
SENTENCE_TRANSFORMERS = _table(
    "sentence_transformers",
    prompts=limited(_are_texts),
    **dict.fromkeys(("truncate_dim", "max_active_dims"), limited(_is_count)),
)
# Fields of the same file for models of images and texts. They have no prompts and no truncate_dim: whole vectors are
# compared.
_IMAGE_TEXT_FIELDS = _table("image_text", prompts=limited(_only()))
_IMAGE_TEXT_TRANSFORMER = {
    "modality_config": limited(_is_of_features),
    "module_output_name": one_of("sentence_embedding"),
    "transformer_task": _EMBEDS,
}
# Fields of each module's config.json. Other modules are refused.
MODULE = {name.removeprefix("module "): _table(name) for name in _TABLES if name.startswith("module ")}
# Fields of preprocessor_config.json. The processor's pixels of sample images are compared with its options.
IMAGE_PROCESSOR = _table("image_processor")
# Fields of adapter_config.json. peft applies them to the weights, into which the adapter is merged. Fields that
# act on some tokens or inputs only, or by chance, have no value that could be merged.
ADAPTER = _table("adapter")

# Names of fields that change no numbers.
_NOTES = re.compile(r"^_|version|name|author|license|dropout|comment|_path$|_dir$|_lr|learning|train|loss|seed|device")
_TOKEN = re.compile("_token$")
_BY_NAME = re.compile(r'(?:getattr\((?:self\.)?config, |\bkwargs\.(?:get|pop)\()\s*"(\w+)"')
_SHOWN, _SHOWN_CHARACTERS = 6, 60


def check_settings(folder: Path, config: Any, task: str) -> list[str]:
    """Returns lines about unknown fields, for a user. Raises SetupError for an unsupported field, with its value."""
    return [line for path, rules, content in _files(folder, config, task) if (line := _check(path, rules, content))]


def check_adapter(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises SetupError if a LoRA adapter has an unsupported field."""
    if settings.get("peft_type") in (None, "LORA"):
        _check(path, ADAPTER, settings)


def _files(folder: Path, config: Any, task: str) -> Iterator[tuple[Path, Rules, Mapping[str, Any]]]:
    """Yields each file that a task reads, with its rules and its content."""
    model_folder = transformer_folder(folder)
    unread = {**_UNREAD, **_UNREAD_OF_KIND.get(config.model_type, {})}
    read = [*_fields(type(config)), *_read_by_name(type(config)), *GENERATION_CONFIG]
    config_rules = {**unread, **dict.fromkeys(read, APPLIED), **CONFIG}
    paths: list[tuple[Path, Rules]] = [(model_folder / "config.json", config_rules)]
    if TASKS[task].generates:
        # unsupported_generation checks the values as transformers reads them, also from config.json.
        paths.append((model_folder / "generation_config.json", dict.fromkeys(GENERATION_CONFIG, APPLIED)))
    if TASKS[task].reads != "images":
        paths.append((model_folder / "tokenizer_config.json", TOKENIZER_CONFIG))
        paths.append((model_folder / "special_tokens_map.json", SPECIAL_TOKENS_MAP))
        paths.append((model_folder / "tokenizer.json", TOKENIZER))
    if TASKS[task].reads != "texts":
        paths.append((model_folder / "preprocessor_config.json", IMAGE_PROCESSOR))
    image_text_fields = _IMAGE_TEXT_FIELDS if TASKS[task].reads == "both" else {}
    paths.append((folder / CONFIGURATION, {**SENTENCE_TRANSFORMERS, **image_text_fields}))
    for kind, path in read_modules(folder):
        if kind in MODULE and path != folder:
            paths.append((path / "config.json", MODULE[kind]))
    if (limits := limits_file(model_folder)) is not None:
        fields = {"transformer_task": _TRANSFORMER_TASKS.get(task, NO_EFFECT)}
        paths.append((limits, {**TRANSFORMER, **(_IMAGE_TEXT_TRANSFORMER if TASKS[task].reads == "both" else fields)}))
    for path, rules in paths:
        # own_code.py checks the rewritten configuration of a known kind, whose names are from its author's code.
        if not path.is_file() or (path.name == "config.json" and path.parent.name == KNOWN_FORM):
            continue
        content = read_object(path)
        yield path, rules, content
        if rules is TOKENIZER and isinstance(content.get("model"), dict):
            yield path, TOKENIZER_MODEL, content["model"]


def _fields(kind: Any) -> Iterable[str]:
    """Returns the fields of a class of configurations, their other names, and the fields that it adds itself."""
    attributes_of_classes = (vars(base) for base in kind.__mro__)
    return {
        *(name for attributes in attributes_of_classes for name in attributes.get("__annotations__", ())),
        *(() if getattr(kind, "has_no_defaults_at_init", False) else vars(kind())),
        *_parameters(kind),
        *getattr(kind, "attribute_map", ()),
        *getattr(kind, "sub_configs", ()),
    }


def _read_by_name(kind: Any) -> Iterator[str]:
    """Yields the fields that the code of a kind of models reads by their names, without declaring them."""
    folder = Path(inspect.getfile(kind)).parent
    for path in (*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")):
        yield from _BY_NAME.findall(path.read_text(encoding="utf-8"))


def _parameters(kind: Any) -> Sequence[str]:
    code = getattr(kind.__init__, "__wrapped__", kind.__init__).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


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
                f"{path}: sets {name} to {shown}, which is not supported; remove the field if the "
                "model works without it"
            )
    if not unknown:
        return ""
    names = ", ".join(sorted(unknown)[:_SHOWN]) + (", …" if len(unknown) > _SHOWN else "")
    return f"      {'not applied':14}{names} of {path.name}: compare results if the model needs it"


def _says_nothing(name: str, value: Any, rules: Rules) -> bool:
    is_token = rules in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP) and _TOKEN.search(name)
    return bool(is_token or _NOTES.search(name) or value in ("", [], {}) or value is False)


def unsupported_generation(config: Any) -> tuple[str, object] | None:
    """Finds the first field of a generation_config that changes the results of `generate` and is not applied."""
    for name in sorted({*transformers.GenerationConfig().to_dict(), *GENERATION_CONFIG}):
        rule, value = GENERATION_CONFIG.get(name, NEVER), getattr(config, name, None)
        if value is not None and not rule.accepts(value):
            return name, value
    return None
