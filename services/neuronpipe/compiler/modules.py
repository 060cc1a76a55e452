"""A Transformers model as a PyTorch module with named inputs and outputs, and with the facts for the bundle.

Loads the weights in float32, and proves that the files contain every weight that the task's graph reads.
"""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import safetensors
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.compiler.architectures import (
    MASKED_DECODERS,
    T5_KINDS,
    decoder_inputs,
    has_decoder,
    positions,
    prepare,
    rotary_limit,
    shifted_inputs,
)
from neuronpipe.compiler.onnx import GRAPHS, OnnxModel, graph_file, has_weights
from neuronpipe.compiler.saved_files import read_object, reason_of, refusing
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import AdapterSpec, ImageSpec, ModelSpec, OutputSpec, TaskFacts
from neuronpipe.tasks.scores import ClassifierFacts, ScoreFunctionName


class Positional(torch.nn.Module):
    """A module that takes its inputs in a fixed order, as a trace does, and passes them on by name."""

    def __init__(self, module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(**dict(zip(self._inputs, tensors, strict=True)))
        return tuple(result[name] for name in self._outputs)


SampleBatch: TypeAlias = Mapping[str, NDArray[Any]]  # int64 [batch, tokens], or uint8 [batch, 3, height, width]
Outputs: TypeAlias = Mapping[str, NDArray[Any]]

# The order is the same everywhere: no check would detect that attention_mask and token_type_ids are swapped.
MASK = "attention_mask"
_INPUTS = ("input_ids", MASK, "token_type_ids")
# A model of images has the first of these inputs; a model of texts and images has both (tasks/inputs/).
PIXELS, PLACES = "pixels", "places"
# The limit of a model for which neither configuration nor tokenizer sets a limit.
NO_LIMIT_TOKENS = 512
# A token between two special tokens.
_FEWEST_TOKENS = 3


@dataclass(frozen=True, slots=True)
class SourceModule:
    """The module in float32 and evaluation mode.

    The module takes int64 [batch, tokens] by input name and returns a dict of float32 outputs [batch, *axes].
    `per_token_outputs`: outputs whose first axis after the batch is the tokens. `facts`: the facts about the model for
    each task that it answers. `query_weights`: see ModelSpec. `remarks`: further information for a user.
    """

    module: torch.nn.Module
    task: str
    architecture: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_tokens: int
    config: Any
    tokenizer: SourceTokenizer
    per_token_outputs: frozenset[str] = frozenset()
    labels: tuple[str, ...] = ()
    image: ImageSpec | None = None
    facts: Mapping[str, TaskFacts] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    largest_bucket: str = ""
    adapters: tuple[AdapterSpec, ...] = ()
    needs_adapter: bool = False
    query_weights: tuple[float, ...] = ()

    @property
    def takes_images(self) -> bool:
        """Whether the model's only input is uint8 [batch, 3, height, width]."""
        return self.image is not None and not self.tokenizer.json

    @property
    def is_recurrent(self) -> bool:
        return any(isinstance(part, torch.nn.LSTM) for part in self.module.modules())

    def free_axes(self, name: str) -> tuple[int, ...]:
        """Returns the axes of an input with any length: batch and tokens; for images and places, only the batch."""
        return (0,) if name in (PIXELS, PLACES) or self.takes_images else (0, 1)

    def shape_of(self, batch: Mapping[str, NDArray[Any]]) -> tuple[int, int]:
        rows = len(batch[self.inputs[-1]])
        return rows, self.max_tokens if self.takes_images else batch["input_ids"].shape[1]

    def within(self, plan: BucketPlan) -> "SourceModule":
        """Limits the module to sequences that fit into a bucket, and the texts that it writes about sources."""
        max_tokens, facts = plan.largest.tokens, dict(self.facts)
        if start := self.fact("decoder_start_token_ids"):
            text_tokens = min(self.fact("max_text_tokens"), max_tokens - len(start))
            facts[self.task] = facts[self.task].model_copy(update={"max_text_tokens": text_tokens})
        return dataclasses.replace(self, max_tokens=max_tokens, largest_bucket=str(plan.largest), facts=facts)

    @property
    def tasks(self) -> tuple[str, ...]:
        return (self.task, *(task for task in self.facts if task != self.task))

    def fact(self, name: str) -> Any:
        """Returns a fact by its name: from the module's own task, or else from another task; None if no task has it."""
        all_facts = [self.facts[task] for task in self.tasks]
        return next((getattr(facts, name) for facts in all_facts if name in type(facts).model_fields), None)

    @property
    def prompt(self) -> str:
        return self.fact("prompt") or ""

    def spec(self, name: str, version: int, outputs: Mapping[str, NDArray[Any]]) -> ModelSpec:
        """Describes the model for the manifest. `outputs`: the outputs of a batch."""
        return ModelSpec(
            name=name,
            version=version,
            task=self.task,
            also_answers=self.tasks[1:],
            architecture=self.architecture,
            inputs=self.inputs,
            outputs=tuple(self._output(output, array.shape[1:]) for output, array in outputs.items()),
            max_tokens=self.max_tokens,
            largest_bucket=self.largest_bucket,
            vocabulary_size=0 if self.takes_images else getattr(self.config, "vocab_size", 0),
            pad_token_id=self.tokenizer.pad_token_id,
            labels=self.labels,
            image=self.image,
            facts=self.facts,
            adapters=self.adapters,
            needs_adapter=self.needs_adapter,
            query_weights=self.query_weights,
        )

    def _output(self, name: str, shape: tuple[int, ...]) -> OutputSpec:
        if self.adapters and self.labels:  # an adapter may have more labels, to which the graph pads
            shape = (*shape[:-1], len(self.labels))
        return OutputSpec(name=name, axes=("tokens", *shape[1:]) if name in self.per_token_outputs else shape)


class Named(torch.nn.Module):
    """Calls a model with keyword arguments only, and returns the outputs that a task needs by name."""

    def __init__(self, model: Any, *outputs: str) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs
        self._has_decoder = has_decoder(model)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.model.config.model_type in MASKED_DECODERS:
            inputs |= decoder_inputs(self.model, attention_mask)
        if self._has_decoder:
            inputs |= shifted_inputs(self.model, input_ids, attention_mask)
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        result = self.model(**inputs, return_dict=True)
        return {name: result[name] for name in self.outputs}


class PooledModule(torch.nn.Module):
    """A model with a head that makes one vector of its token vectors. `output`: the name of the vector."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module, output: str) -> None:
        super().__init__()
        self.model = Named(model, "last_hidden_state")
        self.head = head
        self._output = output

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        prompt_tokens: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        token_vectors = self.model(input_ids, attention_mask, token_type_ids)["last_hidden_state"]
        if (skipped := getattr(self.model.model.config, "skipped_token_id", None)) is not None:
            attention_mask = attention_mask * (input_ids != skipped)
        return self.pool(token_vectors, attention_mask, prompt_tokens)

    def pool(
        self, token_vectors: torch.Tensor, attention_mask: torch.Tensor, prompt_tokens: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Makes the output from vectors of tokens [batch, tokens, width]."""
        return {self._output: self.head(token_vectors, attention_mask, prompt_tokens)}


# The architectures whose only result is the vector of a text.
DPR_ENCODERS = ("DPRQuestionEncoder", "DPRContextEncoder")


def load_encoder(folder: Path) -> Any:
    """Loads a model without a head, or T5's encoder; see load_weights. Raises SetupError for a model of vectors."""
    kind = read_object(transformer_folder(folder) / "config.json").get("model_type")
    if kind == "dpr":
        raise SetupError(
            f"{folder}: {architecture_of(folder) or kind} gives no vectors of tokens; of DPR, "
            f"{' and '.join(DPR_ENCODERS)} are compiled, for sentence-embedding and without a modules.json"
        )
    return load_weights(transformers.AutoModelForTextEncoding if kind in T5_KINDS else transformers.AutoModel, folder)


@contextmanager
def choosing(part: torch.nn.Module, choose: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Makes an encoder or a decoder pass on the vectors of its last hidden state that `choose` returns."""

    def replace(module: torch.nn.Module, args: Any, output: Any) -> Any:
        output["last_hidden_state"] = choose(output["last_hidden_state"])
        return output

    handle = part.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def pretrained_model(module: torch.nn.Module) -> Any:
    return next(part for part in module.modules() if isinstance(part, transformers.PreTrainedModel))


def source_module(
    module: torch.nn.Module,
    model: Any,
    task: str,
    tokenizer: SourceTokenizer,
    *,
    facts: TaskFacts | Mapping[str, TaskFacts],
    outputs: tuple[str, ...] = ("logits",),
    per_token: bool = False,
    max_tokens: int | None = None,
    saved_limit: int | None = None,
    labels: tuple[str, ...] = (),
    remarks: Mapping[str, str] | None = None,
    further_inputs: tuple[str, ...] = (),
) -> SourceModule:
    """Describes `module` around `model`, with the data of the model's configuration and tokenizer.

    - `facts`: for `task`, or by task.
    - `per_token`: the outputs have an axis of tokens.
    - `further_inputs`: inputs that the model lacks.
    - `saved_limit`: max_seq_length of sentence-transformers, which replaces the tokenizer's limit.
    """
    accepted = {*inspect.signature(model.forward).parameters}
    # In a graph, longrope has the factors of short texts.
    rotary = None if isinstance(model, OnnxModel) else rotary_limit(model.config)
    limits = max_tokens, saved_limit or tokenizer.max_tokens, positions(model.config), rotary
    remarks = dict(remarks or {})
    if rotary:
        remarks["positions"] = f"longrope, whose factors of short texts hold up to {rotary} tokens"
    if isinstance(model, OnnxModel):
        accepted &= {*model.inputs}
        remarks = {**remarks, "graph": f"{model.path.name}, as it is; compared with ONNX Runtime"}
    architecture = model.architecture if isinstance(model, OnnxModel) else type(model).__name__
    if MASK not in accepted:
        raise SetupError(
            f"{model.config.name_or_path}: {architecture} takes no {MASK}, so it reads the padding of a batch as text, "
            "which is not supported"
        )
    most = min((limit for limit in limits if limit is not None), default=NO_LIMIT_TOKENS)
    if most < _FEWEST_TOKENS:
        raise SetupError(
            f"{model.config.name_or_path}: takes {most} tokens by model_max_length of its tokenizer, max_seq_length or "
            f"max_position_embeddings, and a text has {_FEWEST_TOKENS} or more; correct the one that is wrong"
        )
    # Batches are padded, also if the tokenizer does not name the mask.
    tokenizer_inputs = {*tokenizer.input_names, MASK}
    return SourceModule(
        module=module.eval(),
        task=task,
        architecture=architecture,
        inputs=(*(name for name in _INPUTS if name in accepted and name in tokenizer_inputs), *further_inputs),
        outputs=outputs,
        max_tokens=most,
        config=model.config,
        tokenizer=tokenizer,
        per_token_outputs=frozenset(outputs if per_token else ()),
        labels=labels,
        facts={task: facts} if isinstance(facts, TaskFacts) else facts,
        remarks=remarks,
    )


def labels_of(config: Any) -> tuple[str, ...]:
    return tuple(config.id2label[index] for index in range(config.num_labels))


def classifier_facts(config: Any) -> ClassifierFacts:
    """Returns the facts of a classifier. Its score function is the default of the pipelines of texts and images.

    Raises SetupError for categories of labels that the model does not have.
    """
    function: ScoreFunctionName = "softmax"
    if config.problem_type == "regression":
        function = "none"
    elif config.problem_type == "multi_label_classification" or config.num_labels == 1:
        function = "sigmoid"
    categories: Any = getattr(config, "moderation_categories", None) or {}
    if not isinstance(categories, dict) or not set(categories) <= set(labels_of(config)):
        raise SetupError(
            f"{config.name_or_path}/config.json: moderation_categories must be an object of the model's labels"
        )
    categories = {label: str(category) for label, category in categories.items()}
    return ClassifierFacts(score_function=function, moderation_categories=categories)


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
