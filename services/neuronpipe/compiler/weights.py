"""Loads a model's weights in float32, and proves that they are all that the task's graph reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.compiler.architectures import prepare
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.compiler.source import why_not_loaded
from neuronpipe.core.errors import SetupError

_SHOWN_KEYS = 4
# Heads whose parameters have the same names in some architectures (ModernBERT, a BERT of sequences for tokens), so that
# none is missing.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def load_weights(auto_class: Any, folder: Path) -> Any:
    """A model in float32 and evaluation mode.

    Parameters that its files lack are 0. Only these require gradients. Raises SetupError for a model that cannot be
    loaded, and for weights of another shape or with NaN or infinity.
    """
    folder = transformer_folder(folder)
    try:
        model, info = auto_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except Exception as error:  # missing and broken files raise different exceptions
        raise SetupError(
            f"{folder}: transformers {transformers.__version__} cannot load it: {why_not_loaded(folder, error)}"
        ) from error
    # transformers 5 also logs the shapes.
    resized = sorted(key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"])
    if resized:
        raise SetupError(
            f"{folder}: its weights {_shown(resized)} have another shape than config.json says, which has "
            f"{model.config.num_labels} "
            "labels; give the name of each label there (id2label and label2id)"
        )
    missing, parameters = sorted(info["missing_keys"]), dict(model.named_parameters(remove_duplicate=False))
    _refuse_missing(
        folder, model, [name for name in missing if name not in parameters]
    )  # buffers, which have no gradients
    damaged = [
        name for name, tensor in model.state_dict().items() if name not in missing and not tensor.isfinite().all()
    ]
    if damaged:
        raise SetupError(
            f"{folder}: its weights {_shown(damaged)} hold NaN or infinity; train the model again, or get "
            "its files again"
        )
    model.requires_grad_(False)
    with torch.no_grad():  # one parameter may have two names
        for name in missing:
            parameters[name].zero_().requires_grad_(True)
    prepare(model)
    return model.eval()


def check_missing(folder: Path, module: SourceModule, sample: Mapping[str, NDArray[Any]]) -> None:
    """Raises SetupError if the graph reads a parameter that the files lack, or uses the head of another task."""
    model = pretrained_model(module.module)
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if missing:
        try:
            read = find_read(module, sample)
        except Exception:  # a head for another number of labels, of which the files have none
            read = missing
        _refuse_missing(folder, model, read)
        model.requires_grad_(False)
    trained, loaded = _trained(model), type(model).__name__
    if trained != loaded and trained.endswith(_CLASSIFIERS) and loaded.endswith(_CLASSIFIERS):
        raise SetupError(f"{folder}: {_other_task(trained, loaded)}")


def find_read(module: SourceModule, sample: Mapping[str, NDArray[Any]]) -> list[str]:
    """The names of the parameters that require gradients and that the graph reads.

    An output for `sample` has a gradient with respect to these.
    """
    candidates = {name: one for name, one in pretrained_model(module.module).named_parameters() if one.requires_grad}
    outputs = module.module(**{name: torch.from_numpy(sample[name]) for name in module.inputs})
    differentiable = [output.sum() for output in outputs.values() if output.requires_grad]
    if not differentiable:
        return []
    gradients = torch.autograd.grad(differentiable, [*candidates.values()], allow_unused=True)
    return [name for name, gradient in zip(candidates, gradients, strict=True) if gradient is not None]


def _refuse_missing(folder: Path, model: Any, names: Sequence[str]) -> None:
    if not names:
        return
    loaded = type(model).__name__
    trained = _trained(model)
    lost = f"its files lost what a {trained} is made of; save the model again"
    reason = lost if trained == loaded else _other_task(trained, loaded)
    raise SetupError(f"{folder}: its weights lack {_shown(sorted(names))}: {reason}")


def _trained(model: Any) -> str:
    return str((model.config.architectures or [type(model).__name__])[0])


def _other_task(trained: str, loaded: str) -> str:
    return (
        f"the model was not trained for this task; it is a {trained}, not a {loaded}: leave out --task, or train "
        "it for the task first"
    )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_KEYS])
