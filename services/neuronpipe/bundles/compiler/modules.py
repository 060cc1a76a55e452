"""A Transformers model as one PyTorch module with named inputs and outputs, with everything that describes it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.compiler.sentence_transformers import read_sentence_transformer
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.buckets import BucketPlan
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec, OutputSpec, ScoreFunctionName

# In this order everywhere: attention_mask and token_type_ids swapped would go unnoticed.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# The first position is the one after the padding id in these families, which costs them positions.
# Source: create_position_ids_from_input_ids in each one's modeling file.
_POSITIONS_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "xmod", "data2vec-text"}


@dataclass(frozen=True, slots=True)
class SourceModule:
    """The module in float32, evaluation mode: int64 [batch, tokens] by input name → a dict of float32 outputs [batch, *axes]."""

    module: torch.nn.Module
    task: str
    architecture: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    max_tokens: int
    config: Any
    tokenizer: SourceTokenizer
    prompt: str = ""
    largest_bucket: str = ""

    def within(self, plan: BucketPlan) -> "SourceModule":
        """The module for sequences that fit into one of the buckets."""
        return dataclasses.replace(self, max_tokens=plan.largest.tokens, largest_bucket=str(plan.largest))

    def spec(self, name: str, version: int, outputs: Mapping[str, NDArray[Any]]) -> ModelSpec:
        """The model for the manifest. `outputs` are those of a batch, whose axis of as many as its tokens is recognised by task."""
        is_per_token = self.task == "question_answering"
        is_classifier = self.task == "text_classification"
        return ModelSpec(
            name=name,
            version=version,
            task=self.task,
            architecture=self.architecture,
            inputs=self.inputs,
            outputs=tuple(
                OutputSpec(name=output, axes=("tokens",) if is_per_token else array.shape[1:]) for output, array in outputs.items()
            ),
            max_tokens=self.max_tokens,
            largest_bucket=self.largest_bucket,
            vocabulary_size=self.config.vocab_size,
            pad_token_id=self.tokenizer.pad_token_id,
            cls_token_id=self.tokenizer.cls_token_id,
            labels=tuple(self.config.id2label[index] for index in range(self.config.num_labels)) if is_classifier else (),
            score_function=_score_function(self.config) if is_classifier else None,
            embedding_dimensions=outputs["sentence_embedding"].shape[1] if self.task == "sentence_embedding" else 0,
            prompt=self.prompt,
        )


class _Named(torch.nn.Module):
    """Calls a model with keyword arguments only, and gives the outputs that a task needs by name."""

    def __init__(self, model: torch.nn.Module, *outputs: str) -> None:
        super().__init__()
        self.model = model
        self.outputs = outputs

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        result = self.model(**inputs, return_dict=True)
        return {name: result[name] for name in self.outputs}


class _Embedding(torch.nn.Module):
    """A model and the modules behind it that make one vector of its token vectors."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.outputs = ("sentence_embedding",)
        self.model = _Named(model, "last_hidden_state")
        self.head = head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        token_vectors = self.model(input_ids, attention_mask, token_type_ids)["last_hidden_state"]
        return {"sentence_embedding": self.head(token_vectors, attention_mask)}


def _text_classification(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = _load(transformers.AutoModelForSequenceClassification, folder)
    return _source_module(_Named(model, "logits"), model, "text_classification", tokenizer)


def _question_answering(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    if tokenizer.transformers_tokenizer.padding_side != "right":
        raise SetupError(f"{folder}: pads on the left, so it reads the context before the question, which is not supported")
    model = _load(transformers.AutoModelForQuestionAnswering, folder)
    return _source_module(_Named(model, "start_logits", "end_logits"), model, "question_answering", tokenizer)


def _sentence_embedding(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    parts = read_sentence_transformer(folder)
    model = _load(transformers.AutoModel, parts.model_folder)
    return _source_module(
        _Embedding(model, parts.head), model, "sentence_embedding", tokenizer, max_tokens=parts.max_tokens, prompt=parts.prompt
    )


TASK_MODULES: dict[str, Callable[[Path, SourceTokenizer], SourceModule]] = {
    "text_classification": _text_classification,
    "sentence_embedding": _sentence_embedding,
    "question_answering": _question_answering,
}


def load_module(folder: Path, task: str, tokenizer: SourceTokenizer, attention: str = "") -> SourceModule:
    """Loads the model for a task; `attention` is transformers' attn_implementation, its own choice where empty.

    Raises SetupError for a model that cannot have the task.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    module = TASK_MODULES[task](folder, tokenizer)
    if attention:
        _set_attention(module, attention)
    return module


def _set_attention(module: SourceModule, attention: str) -> None:
    for part in module.module.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(attention)
            return


def _load(auto_class: Any, folder: Path) -> Any:
    try:
        model, info = auto_class.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # a file that is missing or broken, weights of other shapes: each raises something else
        raise SetupError(f"{folder}: transformers {transformers.__version__} cannot load it: {error}") from error
    missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
    if missing:
        raise SetupError(f"{folder}: its weights lack {', '.join(missing[:4])}: the model was not trained for this task")
    return model.eval()


def _source_module(
    module: _Named | _Embedding,
    model: Any,
    task: str,
    tokenizer: SourceTokenizer,
    *,
    max_tokens: int | None = None,
    prompt: str = "",
) -> SourceModule:
    accepted = inspect.signature(model.forward).parameters
    return SourceModule(
        module=module.eval(),
        task=task,
        architecture=type(model).__name__,
        inputs=tuple(name for name in _INPUTS if name in accepted and name in tokenizer.input_names),
        outputs=module.outputs,
        max_tokens=min(limit for limit in (max_tokens, tokenizer.max_tokens, _positions(model.config)) if limit is not None),
        config=model.config,
        tokenizer=tokenizer,
        prompt=prompt,
    )


def _positions(config: Any) -> int:
    positions = int(getattr(config, "max_position_embeddings", 0) or 512)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return positions - int(config.pad_token_id) - 1
    return positions


def _score_function(config: Any) -> ScoreFunctionName:
    # As TextClassificationPipeline.postprocess chooses where its caller does not.
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"
