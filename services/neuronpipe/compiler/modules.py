"""A Transformers model as a PyTorch module with named inputs and outputs, and with the facts for the bundle."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.compiler.architectures import (
    MASKED_DECODERS,
    decoder_inputs,
    has_decoder,
    positions,
    rotary_limit,
    shifted_inputs,
)
from neuronpipe.compiler.onnx import OnnxModel
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
    """Calls a model with keyword arguments only, and returns the outputs that a task needs by name.

    `outputs`: the model's names of them. `renamed`: its names of outputs by other names.
    """

    def __init__(self, model: Any, *outputs: str, **renamed: str) -> None:
        super().__init__()
        self.model = model
        self.outputs = dict(zip(outputs, outputs, strict=True)) | renamed
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
        return self._named(self.model(**inputs, return_dict=True))

    def _named(self, result: Any) -> dict[str, torch.Tensor]:
        return {ours: result[theirs] for ours, theirs in self.outputs.items()}


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
        problem = f"{architecture} takes no {MASK}, so it reads the padding of a batch as text, which is not supported"
        raise SetupError(f"{model.config.name_or_path}: {problem}; compile a model that masks padding, such as BERT")
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
