"""Merges an adapter (LoRA and other methods of peft) into its base model. The result compiles like any other model."""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.saved_settings import check_adapter
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.compiler.source import ADAPTER_CONFIG, ModelSource, check_configuration, find_source
from neuronpipe.core.errors import SetupError

# peft's task types → transformers' class with that head. Source: peft.TaskType; its two other types are for models that
# write text.
_HEADS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
_PREFIX = "base_model.model."
_SHOWN_KEYS = 4


def merge_adapter(source: str, revision: str | None, base: str, folder: Path) -> ModelSource:
    """Writes the merged model into `folder`: the base's files, the adapter's own files, and the merged weights.

    `base`: a folder or an id on the Hub; empty: the base model that the adapter's configuration names. Parameters that
    neither the base nor the adapter contains are left out, so that an untrained head is refused as for any other model.
    Raises SetupError.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        advice = "pip install 'neuronpipe[compile-adapters]'"
        raise SetupError(f"--merge-adapter needs the package {error.name}, which is not installed: {advice}") from error
    adapter = find_source(source, revision, is_adapter=True)
    settings = read_object(adapter.folder / ADAPTER_CONFIG)
    check_adapter(adapter.folder / ADAPTER_CONFIG, settings)
    named = str(settings.get("base_model_name_or_path") or "")
    if not (base or named):
        raise SetupError(f"{source}: {ADAPTER_CONFIG} names no base model; name it with --base-model")
    try:
        base_source = find_source(base or named, None if base else settings.get("revision"))
    except SetupError as error:
        advice = "" if base else f"; {ADAPTER_CONFIG} names it, --base-model names another place"
        raise SetupError(f"the base model of {source}: {error}{advice}") from error
    _copy(base_source.folder, folder)
    _copy(adapter.folder, folder)
    model_folder = transformer_folder(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _write_merged(peft, adapter.folder, settings, transformer_folder(base_source.folder), model_folder)
    return ModelSource(adapter.location, folder, adapter.revision, base=base_source.location)


def _copy(source: Path, target: Path) -> None:
    """Copies all files except weights and the adapter's own files."""
    ignore = shutil.ignore_patterns(
        "*.safetensors", "*.bin", "*.safetensors.index.json", "adapter_*", "onnx", "openvino", ".git"
    )
    shutil.copytree(source, target, ignore=ignore, dirs_exist_ok=True)


def _write_merged(peft: Any, adapter: Path, settings: Mapping[str, Any], base: Path, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    content = read_object(folder / "config.json")
    check_configuration(base, read_object(base / "config.json"))
    auto_class = _class_of(adapter, settings, content)
    with refusing(f"{adapter}: the adapter's weights cannot be read; get the files again", why=None):
        trained = peft.utils.load_peft_weights(str(adapter), device="cpu")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_labels = _count_labels(auto_class, config, trained)
    unfit, advice = f"{adapter}: the adapter does not fit its base model {base}", "name the right one with --base-model"
    with refusing(f"{unfit}; {advice}", why=None):
        model, info = auto_class.from_pretrained(
            base,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
        tokens = len(transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        if tokens > model.get_input_embeddings().weight.shape[0]:  # as in peft's own AutoPeftModel
            model.resize_token_embeddings(tokens)
        adapted = peft.PeftModel.from_pretrained(model, str(adapter))
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    if odd := sorted({*(expected - {*trained}), *({*trained} - expected - {*adapted.state_dict()})}):
        raise SetupError(f"{unfit}: {', '.join(odd[:_SHOWN_KEYS])} is in one only; {advice}")
    if not hasattr(adapted, "merge_and_unload"):
        raise SetupError(f"{adapter}: an adapter of the kind {settings.get('peft_type')} cannot be merged; LoRA can")
    with refusing(f"{adapter}: peft cannot merge the adapter"):
        merged = adapted.merge_and_unload()
    mismatched = {key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]}
    untrained = (set(info["missing_keys"]) | mismatched) - {name.removeprefix(_PREFIX) for name in trained}
    merged.save_pretrained(
        folder, state_dict={name: tensor for name, tensor in merged.state_dict().items() if name not in untrained}
    )


def _class_of(adapter: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Returns the class of transformers with which the adapter was trained."""
    kind = settings.get("task_type")
    mapped = (settings.get("auto_mapping") or {}).get("base_model_class")
    name = _HEADS.get(str(kind)) if kind else str(mapped or (config.get("architectures") or ["AutoModel"])[0])
    if name is None:
        raise SetupError(
            f"{adapter}: the adapter is for {kind}, a model that writes text, with which adapters are not merged "
            "here; merge it with peft (merge_and_unload), save the model and its tokenizer, and compile that folder"
        )
    if not hasattr(transformers, name):
        raise SetupError(
            f"{adapter}: the adapter is for a model {name}, which transformers {transformers.__version__} does not have"
        )
    return getattr(transformers, name)


def _count_labels(auto_class: Any, config: Any, trained: Mapping[str, torch.Tensor]) -> int:
    """Counts the rows of the adapter's own head, which its configuration does not name, or else the base's labels."""
    with torch.device("meta"):
        model = auto_class.from_config(config) if auto_class.__name__.startswith("Auto") else auto_class(config)
    body = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        trained_weight = trained.get(_PREFIX + name)
        if trained_weight is not None and not name.startswith(body) and trained_weight.shape != parameter.shape:
            return int(trained_weight.shape[0])
    return int(config.num_labels)
