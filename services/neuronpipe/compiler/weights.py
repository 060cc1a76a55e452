"""Loads a model in float32, and proves that its files contain every weight that the graph of a task reads."""

import dataclasses
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.compiler.architectures import T5_KINDS, prepare
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.onnx import GRAPHS, OnnxModel, graph_file, has_weights
from neuronpipe.compiler.saved_files import read_object, reason_of, refusing
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.core.errors import SetupError

_SHOWN = 4
_WHOLE = ("model.safetensors", "pytorch_model.bin")
# Weights of ONNX, OpenVINO, TensorFlow, Flax and llama.cpp.
_OTHER_WEIGHTS = (*GRAPHS, "openvino/*.xml", "*.h5", "*.msgpack", "*.gguf")
# Ends of the names of tensors that quantizations store beside weights, or instead of them.
_QUANTIZED = (".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros", ".scales", ".SCB", ".absmax", ".quant_map")
# Heads whose parameters have the same names in some architectures (ModernBERT, a BERT of sequences for tokens), so that
# no parameter is missing.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_WITH_LABELS = (*_CLASSIFIERS, "ForImageClassification", "ForQuestionAnswering")
# Parts of names: heads of training and of other tasks, in files as published, and numbers that transformers computes.
_OTHER_PARTS = frozenset(
    (
        *("cls", "lm_head", "classifier", "pooler", "score", "qa_outputs", "head", "heads", "mlm", "mtp"),
        *("discriminator_predictions", "generator_predictions", "generator_lm_head", "lm_predictions", "predictions"),
        *("mask_predictions", "vocab_transform", "vocab_layer_norm", "vocab_projector", "final_logits_bias", "version"),
        *("sequence_summary", "classification_head", "pre_classifier", "nsp", "seq_relationship", "logit_scale"),
        *("mask_token", "position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index"),
        *("sop_classifier", "attn_mask", "num_batches_tracked", "embed_positions", "position_embeddings"),
        *("pred_layer", "lm_loss"),
    )
)
_NUMBER = re.compile(r"\.\d+\.")


def architecture_of(folder: Path) -> str:
    """Returns the architecture that config.json names, or an empty text."""
    return str((read_object(transformer_folder(folder) / "config.json").get("architectures") or [""])[0])


def load_weights(auto_class: Any, folder: Path) -> Any:
    """Loads a model in float32 and evaluation mode, or the ONNX graph of a model without weights.

    Parameters that its files lack are 0. Only these require gradients. Raises SetupError for a model that cannot be
    loaded, and for weights of another shape or with NaN or infinity.
    """
    if (graph := graph_file(folder)) is not None:
        return OnnxModel(folder, graph)
    folder = transformer_folder(folder)
    problem = f"{folder}: transformers {transformers.__version__} cannot load it"
    with refusing(problem, why=partial(_why_not_loaded, folder)):
        model, info = auto_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    # transformers 5 also logs the shapes.
    if resized := sorted(key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]):
        advice, body = "; get its files again, both of one model", f"{model.base_model_prefix}."
        if type(model).__name__.endswith(_WITH_LABELS) and not any(name.startswith(body) for name in resized):
            labels = f"which has {model.config.num_labels} labels"
            advice = f", {labels}; give the name of each label there (id2label and label2id)"
        raise SetupError(f"{folder}: its weights {_names(resized)} have another shape than config.json says{advice}")
    if quantized := sorted(name for name in info["unexpected_keys"] if name.endswith(_QUANTIZED)) or _integers(folder):
        raise SetupError(
            f"{folder}: its weights {_names(quantized)} are those of a quantization, which config.json does not name "
            "(quantization_config); compile the original model, with --dtype int8 to have it quantized here"
        )
    # All models leave out layers that only guess tokens ahead.
    guesses = getattr(model.config, "num_nextn_predict_layers", None)
    name_patterns = (
        set() if guesses else {_NUMBER.sub(".", name) for name in model.state_dict() if _NUMBER.search(name)}
    )
    if beyond := [name for name in info["unexpected_keys"] if _NUMBER.sub(".", name) in name_patterns]:
        raise SetupError(
            f"{folder}: its weights have more layers ({_names(sorted(beyond))}) than config.json says; correct the "
            "number there, or get its files again, both of one model"
        )
    missing, parameters = sorted(info["missing_keys"]), dict(model.named_parameters(remove_duplicate=False))
    _refuse_missing(folder, model, [name for name in missing if name not in parameters])  # buffers have no gradients
    loaded = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    if damaged := [name for name, tensor in loaded.items() if not tensor.isfinite().all()]:
        advice = "train the model again, or get its files again"
        raise SetupError(f"{folder}: its weights {_names(damaged)} hold NaN or infinity; {advice}")
    model.requires_grad_(False)
    with torch.no_grad():  # a parameter may have two names
        for name in missing:
            parameters[name].zero_().requires_grad_(True)
    model.unused_weights = () if guesses else _unused(model, info["unexpected_keys"])
    prepare(model)
    return model.eval()


# Models of texts and of other inputs → their part for texts, which alone is compiled.
_TEXT_PARTS = {"embedding_gemma2": "language_model"}
# The architectures whose only result is the vector of a text.
DPR_ENCODERS = ("DPRQuestionEncoder", "DPRContextEncoder")


def load_encoder(folder: Path) -> Any:
    """Loads a model without a head, or T5's encoder; see load_weights. Raises SetupError for a model of vectors."""
    kind = read_object(transformer_folder(folder) / "config.json").get("model_type")
    if kind == "dpr":
        advice = f"of DPR, {' and '.join(DPR_ENCODERS)} are compiled, for sentence-embedding and without a modules.json"
        raise SetupError(f"{folder}: {architecture_of(folder) or kind} gives no vectors of tokens; {advice}")
    model = load_weights(transformers.AutoModelForTextEncoding if kind in T5_KINDS else transformers.AutoModel, folder)
    return getattr(model, _TEXT_PARTS[kind]) if kind in _TEXT_PARTS else model


def check_tokens(folder: Path, module: SourceModule) -> None:
    """Raises SetupError if the model has no embeddings for some tokens of the tokenizer."""
    if module.takes_images:
        return
    rows, transformers_tokenizer = int(module.config.vocab_size), module.tokenizer.transformers_tokenizer
    # A text also gets tokens that the vocabulary lacks, by their number.
    added = {
        f"the id {number}": number
        for texts in (("a",), ("a", "a"))
        for number in transformers_tokenizer(*texts)["input_ids"]
    }
    if beyond := [token for token, number in (transformers_tokenizer.get_vocab() | added).items() if number >= rows]:
        raise SetupError(
            f"{folder}: its tokenizer has tokens beyond the model's {rows} embeddings ({_names(sorted(beyond))}); "
            "train the model after resize_token_embeddings, or take them out of the tokenizer"
        )


def with_unused_weights(module: SourceModule) -> SourceModule:
    """Adds a remark about weights in the model's files that no parameter of the graph has."""
    names = getattr(pretrained_model(module.module), "unused_weights", ())
    if not names:
        return module
    others = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    remark = f"the weights {_names(names)}{others}: transformers has no such weights in {module.architecture}"
    return dataclasses.replace(module, remarks={**module.remarks, "not used": remark})


def _unused(model: Any, unexpected: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of weights without a use, except of heads of other tasks and of numbers that are computed."""
    names = sorted(
        name
        for name in unexpected
        if _OTHER_PARTS.isdisjoint(name.split(".")) and not name.endswith((".attn.bias", ".attention.bias"))
    )
    trained: Any = getattr(transformers, _trained_class(model), None)
    if not names or trained is type(model):
        return tuple(names)
    if getattr(trained, "config_class", None) is not type(model.config):  # such as HF_ColBERT, with a layer of its own
        return ()
    with torch.device("meta"):
        known = trained(model.config).state_dict()
    return tuple(name for name in names if name not in known)


def _integers(folder: Path) -> list[str]:
    """Returns the names of weights that are whole numbers."""
    names = list[str]()
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys() if name.endswith("weight")}  # noqa: SIM118
        names += [name for name, kind in kinds.items() if not kind.startswith(("F", "BF"))]
    return names


def check_missing(folder: Path, module: SourceModule, sample: Mapping[str, NDArray[Any]]) -> None:
    """Raises SetupError if the graph reads a parameter that the files lack, or uses the head of another task."""
    model = pretrained_model(module.module)
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if missing:
        try:
            read = find_read(module, sample)
        except Exception:  # a head for another number of labels, which the files lack
            read = missing
        _refuse_missing(folder, model, read)
        model.requires_grad_(False)
    trained, loaded = _trained_class(model), type(model).__name__
    if trained != loaded and trained.endswith(_CLASSIFIERS) and loaded.endswith(_CLASSIFIERS):
        raise SetupError(f"{folder}: {_other_task(trained, loaded)}")


def find_read(module: SourceModule, sample: Mapping[str, NDArray[Any]]) -> list[str]:
    """Finds the names of the parameters that require gradients and that change an output for `sample`."""
    candidates = {
        name: parameter
        for name, parameter in pretrained_model(module.module).named_parameters()
        if parameter.requires_grad
    }
    outputs = module.module(**{name: torch.from_numpy(sample[name]) for name in module.inputs})
    differentiable = [output.sum() for output in outputs.values() if output.requires_grad]
    if not differentiable:
        return []
    gradients = torch.autograd.grad(differentiable, [*candidates.values()], allow_unused=True)
    return [name for name, gradient in zip(candidates, gradients, strict=True) if gradient is not None]


def _refuse_missing(folder: Path, model: Any, names: Sequence[str]) -> None:
    if not names:
        return
    loaded, trained = getattr(model, "published_as", type(model).__name__), _trained_class(model)
    lost = f"its files lost what a {trained} is made of; save the model again"
    reason = lost if trained == loaded else _other_task(trained, loaded)
    raise SetupError(f"{folder}: its weights lack {_names(sorted(names))}: {reason}")


def _trained_class(model: Any) -> str:
    return str((model.config.architectures or [type(model).__name__])[0])


def _other_task(trained: str, loaded: str) -> str:
    return (
        f"the model was not trained for this task; it is a {trained}, not a {loaded}: leave out --task, or train "
        "it for the task first"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])


def _why_not_loaded(folder: Path, error: Exception) -> str:
    """Explains why weights cannot be loaded: missing or damaged files, or else the error of transformers."""
    whole = next((name for name in _WHOLE if (folder / name).is_file()), "")
    for path in () if whole else sorted(folder.glob("*.index.json")):
        file_of_weight = read_object(path).get("weight_map")
        if not isinstance(file_of_weight, dict) or not file_of_weight:
            return f"{path.name} has no weight_map of files; get the file again"
        if missing := sorted({name for name in map(str, file_of_weight.values()) if not (folder / name).is_file()}):
            return f"{path.name} names {_names(missing)}, which is missing; get these files as well"
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safetensors.safe_open(path, "pt"):
                pass
        except Exception as damage:  # an invalid header, or a file that ends early
            return f"{path.name} is damaged or cut off ({damage}); get the file again"
    for path in sorted(folder.glob("pytorch_model*.bin")):
        try:
            content = torch.load(path, map_location="meta", weights_only=True)
            if not isinstance(content, dict):
                return f"{path.name} holds {type(content).__name__}, not weights by their names; get the file again"
        except Exception as damage:
            if isinstance(damage, pickle.UnpicklingError) and "GLOBAL" in str(damage):
                advice = "get the weights as safetensors"
                return f"{path.name} holds more than numbers, and to read it might run its code; {advice}"
            return f"{path.name} is damaged or cut off; get the file again"
    if not has_weights(folder):
        others = sorted(path.name for kind in _OTHER_WEIGHTS for path in folder.glob(kind))
        only = f", only {', '.join(others[:_SHOWN])}" if others else ""
        return f"it has no weights of PyTorch (model.safetensors or pytorch_model.bin){only}; get these as well"
    return reason_of(error)
