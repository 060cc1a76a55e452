"""Finds the task of a model in its configuration. Refuses models that cannot be served, with the reason.

The first source that names a task decides:

1. The modules and the settings that sentence-transformers saved: modules.json, config_sentence_transformers.json.
2. The architecture's name, which contains the head of the model.

If the head has several tasks, README.md decides (pipeline_tag), or else the labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.repocard import metadata_load
from transformers.models.auto import modeling_auto

from neuronpipe.compiler.architectures import MASKED_DECODERS, READING_KINDS, T5_KINDS
from neuronpipe.compiler.gliner import ARCHITECTURE
from neuronpipe.compiler.images import IMAGE_PARTS, TEXT_PARTS
from neuronpipe.compiler.modules import SourceModule
from neuronpipe.compiler.onnx import graph_file
from neuronpipe.compiler.own_graphs import OWN_GRAPHS
from neuronpipe.compiler.rerankers import entailing, is_cross_encoder, ranking, score_function
from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.sentence_transformers import read_modules, read_settings, transformer_folder
from neuronpipe.compiler.source import check_configuration, port_of, reads_of
from neuronpipe.compiler.tasks import SOURCE_TASKS
from neuronpipe.compiler.weights import DPR_ENCODERS
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS

# The end of an architecture's name → the tasks that its head serves, the default task first.
_HEADS: Mapping[str, tuple[str, ...]] = {
    "ForSequenceClassification": ("text_classification", "rerank", "zero_shot_classification"),
    "ForTokenClassification": ("token_classification",),
    ARCHITECTURE: ("zero_shot_token_classification",),
    "ForQuestionAnswering": ("question_answering",),
    "ForMaskedLM": ("fill_mask", "feature_extraction", "sentence_embedding", "sparse_embedding"),
    # ELECTRA's head tells replaced tokens from others, which no task does.
    "ElectraForPreTraining": ("feature_extraction", "sentence_embedding"),
    "ForPreTraining": ("fill_mask", "feature_extraction", "sentence_embedding", "sparse_embedding"),
    "ForImageClassification": ("image_classification",),
    "ForCausalLM": ("text_generation", "feature_extraction", "sentence_embedding", "rerank"),
    "LMHeadModel": ("text_generation",),
    "ForConditionalGeneration": ("summarization", "translation", "feature_extraction", "sentence_embedding"),
    "MTModel": ("translation",),
    **dict.fromkeys(IMAGE_PARTS, ("image_embedding",)),
    **dict.fromkeys(DPR_ENCODERS, ("sentence_embedding",)),
    **dict.fromkeys(TEXT_PARTS, ("sentence_embedding", "feature_extraction")),
    "Model": ("feature_extraction", "sentence_embedding", "image_embedding", "zero_shot_image_classification"),
}
_WRITING_HEADS = ("ForCausalLM", "LMHeadModel")
_READING_HEADS = ("ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
_FROM_TEXT_TO_TEXT = ("summarization", "translation")
_OF_ENCODERS = ("feature_extraction", "sentence_embedding", "sentence_similarity", "multi_vector_embedding")
# Encoder-decoders whose attention depends on distances, which OpenVINO's attention with a cache in blocks leaves out.
# All layers of the first kinds share the biases, which can thus be a part of the mask.
WITH_SHARED_BIASES = ("t5", "mt5")
_WITH_OTHER_BIASES = ("umt5", "longt5", "switch_transformers", "pop2piano", "udop")
_PIPELINE_TAGS = {
    "sentence-similarity": "sentence_embedding",
    "text-ranking": "rerank",
    "image-feature-extraction": "image_embedding",
}

_SPARSE = {"SparseEncoder", "SpladePooling", "SparseAutoEncoder", "SparseStaticEmbedding", "splade", "sparse-encoder"}
_MULTI_VECTOR = {"MultiVectorEncoder", "ColBERT", "HF_ColBERT", "colbert", "pylate", "late-interaction"}

# Model type → why no graph is made of it.
_REFUSED = {
    "bros": "it reads the place of each word on a page (bbox), which no task has; compile a model of texts alone",
    "led": "its encoder attends in windows, by lengths that a graph for all texts lacks; compile BART or PEGASUS",
    "nystromformer": "its attention averages segments of a batch, so its outputs depend on the batch, because it reads "
    "padding as text; compile a model with full attention, such as BERT",
    "canine": "its tokenizer reads characters and has no form as tokenizer.json, and its layers join neighbouring "
    "characters; compile a model of tokens for several languages, such as XLM-R",
    "extractor": "it is a GLiNER2, whose extraction by a schema of labels, classes and counts no task has; compile a "
    "GLiNER of the package gliner for zero-shot-token-classification",
    "altclip": "of models of images and texts, CLIP and SigLIP are; compile a model of these",
    "funnel": "its layers pool neighbouring tokens, by lengths that a graph for texts of all lengths lacks",
}

# Names of the first input of models that hear.
_SOUNDS = ("input_values", "input_features")
_SHOWN_LABELS = 8


@dataclass(frozen=True, slots=True)
class DetectedTask:
    """A task, and the reason for its choice, for a user."""

    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The configuration in a model's files. sentence-transformers saved `settings` and `modules`."""

    folder: Path
    config: Any
    architecture: str
    settings: Mapping[str, Any]
    modules: tuple[str, ...]
    card: Mapping[str, Any]
    weights_dtype: str
    has_own_code: bool

    @property
    def encoder_decoder_tasks(self) -> tuple[str, ...] | None:
        """The tasks of a model with an encoder and a decoder, or of such an encoder; None for other models."""
        return _tasks_of_encoder_decoder(self.config, self.architecture)

    def find_task(self) -> DetectedTask:
        """Finds the task for which the model was made. Raises SetupError, with the kind of model, if no task fits."""
        if self._is_sparse():
            reason = "modules.json" if self.modules else f"{self.architecture}; README.md"
            return DetectedTask("sparse_embedding", reason)
        if self._kinds() & _MULTI_VECTOR:
            return DetectedTask("multi_vector_embedding", "modules.json" if self.modules else self.architecture)
        self._refuse_other_kinds()
        if "CLIPModel" in self.modules or (self.modules and reads_of(self.config, self.architecture) == "both"):
            return DetectedTask("zero_shot_image_classification", "modules.json")
        if self.modules and self.settings.get("model_type") != "CrossEncoder":
            return DetectedTask("sentence_embedding", "modules.json")
        if "Pooling" in self.modules:
            return DetectedTask("rerank", "modules.json, saved as a cross-encoder")
        if not self.architecture:
            raise SetupError(
                f"{self.folder}: config.json names no architecture, so its task is not known; choose one with --task"
            )
        head = next((head for head in _HEADS if self.architecture.endswith(head)), None)
        if head is None or not (
            hasattr(transformers, self.architecture) or self.architecture in (*OWN_GRAPHS, ARCHITECTURE)
        ):
            advice = f"known are those that end in {', '.join(_HEADS)}"
            raise SetupError(f"{self.folder}: {self.architecture} is not a known architecture; {advice}")
        tag = str(self.card.get("pipeline_tag") or "")
        tasks = tuple(task for task in _HEADS[head] if self._can(task))
        if not tasks:
            raise SetupError(
                f"{self.folder}: config.json names {self.architecture}, and its model type {self.config.model_type!r} "
                "has no such head; correct the one that is wrong"
            )
        tagged_task = _PIPELINE_TAGS.get(tag, tag.replace("-", "_"))
        detected = self._by_labels(tasks)
        if tagged_task in tasks:
            detected = DetectedTask(tagged_task, f"{self.architecture}; README.md: {tag}")
        self.check_task(detected.task)
        if detected.task not in SOURCE_TASKS:
            problem = f"{self.architecture} is for {detected.task}, which is not supported"
            raise SetupError(f"{self.folder}: {problem}; supported are {', '.join(SOURCE_TASKS)}")
        return detected

    def check_task(self, task: str) -> None:
        """Raises SetupError if the model writes text and the task does not, or the other way round."""
        causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        kind, name = self.config.model_type, self.architecture or self.config.model_type
        if getattr(self.config, "vision_config", None) and self.architecture.endswith("ForConditionalGeneration"):
            raise SetupError(
                f"{self.folder}: {name} writes text about images and texts, which is not supported; decoders of texts "
                f"alone are, which end in {' or '.join(_WRITING_HEADS)}"
            )
        if name.endswith("WithProjection") and name not in _HEADS:
            raise SetupError(
                f"{self.folder}: {name} projects its vectors, which is supported for parts of CLIP alone; compile the "
                "whole model of images and texts, if it is CLIP or SigLIP"
            )
        writes = self.architecture.endswith(_WRITING_HEADS)
        tasks = self.encoder_decoder_tasks or ()
        if task in tasks and task in _FROM_TEXT_TO_TEXT and kind in _WITH_OTHER_BIASES:
            raise _other_biases(self.folder, name)
        if task in tasks:
            return
        if tasks or task in _FROM_TEXT_TO_TEXT:
            others = f"; its tasks are {', '.join(tasks).replace('_', '-')}" if tasks else ""
            raise SetupError(
                f"{self.folder}: {name} cannot have the task {task.replace('_', '-')}: summarization and translation "
                f"are for models with an encoder and a decoder that write text{others}"
            )
        is_decoder = (kind in causal and kind not in masked) or getattr(self.config, "is_decoder", False) or writes
        if is_decoder and task != "text_generation" and kind not in MASKED_DECODERS:
            raise SetupError(
                f"{self.folder}: {name} is a decoder, which writes text; the only task of such decoders is "
                f"text-generation; vectors and scores are made by those of the kinds {', '.join(MASKED_DECODERS)}"
            )
        if task == "text_generation" and not (is_decoder and writes):
            reason = f"text-generation is for decoders, which end in {' or '.join(_WRITING_HEADS)}"
            raise SetupError(f"{self.folder}: {name} does not write text: {reason}")

    def dtype_of(self, dtypes: tuple[str, ...]) -> str:
        """Returns the data type to compile in: the type of the weights, if `dtypes` contains it, or float32."""
        return self.weights_dtype if self.weights_dtype in dtypes else "float32"

    def _is_sparse(self) -> bool:
        """Returns whether the model weighs tokens. Raises SetupError if it weighs them otherwise than SPLADE."""
        if not self._kinds() & _SPARSE:
            return False
        if not self.modules and not self.architecture.endswith(("ForMaskedLM", "ForPreTraining")):
            raise SetupError(
                f"{self.folder}: makes sparse vectors, and {self.architecture} has no head of a masked language model, "
                "which sparse-embedding needs"
            )
        return True

    def _kinds(self) -> set[str]:
        # With a Pooling, the model makes one vector of a text, however README.md names it.
        tags = None if "Pooling" in self.modules else self.card.get("tags")
        words = [str(tag).lower() for tag in tags] if isinstance(tags, list) else ()
        return {*self.modules, str(self.settings.get("model_type")), self.architecture, *words}

    def _refuse_other_kinds(self) -> None:
        if (self.folder / "config_setfit.json").is_file():
            problem = "is a SetFit model, whose classifier (model_head.pkl) is a pickle and not read"
            raise SetupError(f"{self.folder}: {problem}; --task sentence-embedding compiles what makes its vectors")
        if (
            self.settings.get("model_type") == "CrossEncoder"
            and "Pooling" not in self.modules
            and (others := ", ".join(sorted(set(self.modules) - {"Transformer", "LogitScore"})))
        ):
            advice = "supported are LogitScore, and Pooling with what may follow it"
            raise SetupError(f"{self.folder}: is a cross-encoder with {others} behind its model; {advice}")
        is_scoring = self.architecture.endswith("ForSequenceClassification") and self.config.num_labels == 1
        if is_scoring and is_cross_encoder(self.folder, self.config):
            score_function(self.folder, self.config)

    def _can(self, task: str) -> bool:
        if self.encoder_decoder_tasks is not None and task not in self.encoder_decoder_tasks:
            return False
        if self.architecture.endswith(_WRITING_HEADS) and task != "text_generation":
            return self.config.model_type in MASKED_DECODERS
        reads = reads_of(self.config, self.architecture) or "texts"
        if TASKS[task].reads != reads:
            return False
        facts = {"rerank": ranking, "zero_shot_classification": entailing}
        try:
            return task not in facts or bool(facts[task](self.folder, self.config))
        except SetupError:
            return False

    def _by_labels(self, tasks: tuple[str, ...]) -> DetectedTask:
        if "rerank" in tasks and is_cross_encoder(self.folder, self.config):
            kind = "" if self.architecture.endswith(_WRITING_HEADS) else " with one label"
            return DetectedTask("rerank", f"{self.architecture}{kind}, saved as a cross-encoder")
        if "translation" in tasks and self.config.model_type in ("mbart", "m2m_100"):
            return DetectedTask("translation", f"{self.architecture}, which is made for several languages")
        if "zero_shot_classification" in tasks:
            return DetectedTask("zero_shot_classification", f"{self.architecture} with a label for entailment")
        return DetectedTask(tasks[0], self.architecture)


def read_configuration(folder: Path) -> Configuration:
    """Reads a model's configuration files. Raises SetupError if no task can serve the model."""
    model_folder = transformer_folder(folder)
    content = read_object(model_folder / "config.json")
    kind = content.get("model_type")
    architecture = str((content.get("architectures") or [""])[0])
    has_graph = graph_file(folder) is not None
    if not has_graph and (reason := _REFUSED.get(str(kind))):
        raise SetupError(f"{folder}: {architecture or kind} is not supported: {reason}")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        remote = "; it has code of its own (auto_map), which is not run" if content.get("auto_map") else ""
        remote += f"; {port}" if (port := port_of(content)) else ""
        raise SetupError(
            f"{folder}: config.json has the model type {kind!r}, which transformers {transformers.__version__} does "
            f"not know{remote}"
        )
    if not has_graph:
        check_configuration(folder, content)
    with refusing(f"{folder}: transformers {transformers.__version__} cannot read its config.json"):
        config = transformers.AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    if (first_input := getattr(getattr(transformers, architecture, None), "main_input_name", "")) in _SOUNDS:
        problem = f"{architecture} takes sounds ({first_input}), and tasks have texts and images"
        raise SetupError(f"{folder}: {problem}; compile a model of these")
    _refuse_encoder_decoders(folder, config, architecture)
    return Configuration(
        folder=folder,
        config=config,
        architecture=architecture,
        settings=read_settings(folder),
        modules=tuple(kind for kind, _ in read_modules(folder)),
        card=_card(folder),
        weights_dtype=str(content.get("dtype") or content.get("torch_dtype") or "float32"),
        has_own_code=bool(content.get("auto_map")) and not has_graph,
    )


def describe(module: SourceModule, reason: str, dtype: str, weights_dtype: str) -> str:
    also = "".join(f"; also answers {other}" for other in module.tasks[1:])
    lines = {"task": f"{module.task} ({reason}){also}"}
    if labels := module.labels:
        shown = ", ".join(labels[:_SHOWN_LABELS]) + (", …" if len(labels) > _SHOWN_LABELS else "")
        lines["labels"] = f"{len(labels)}: {shown}"
    if function := module.fact("score_function"):
        lines["scores"] = {"none": "the logits as they are"}.get(function, function)
    if dimensions := module.fact("embedding_dimensions"):
        lines["vectors"] = f"{dimensions} dimensions"
    lines |= module.remarks
    if prompt := module.prompt:
        lines["prompt"] = repr(prompt)
    if not module.takes_images:
        lines["longest input"] = f"{module.max_tokens} tokens"
    lines["dtype"] = dtype if dtype == weights_dtype else f"{dtype}; the weights are {weights_dtype}"
    return "\n".join(f"      {name:14}{line}" for name, line in lines.items())


def _tasks_of_encoder_decoder(config: Any, architecture: str) -> tuple[str, ...] | None:
    """Returns the tasks of an encoder-decoder or its encoder, empty if it is not supported; None for other models."""
    kind = config.model_type
    if not getattr(config, "is_encoder_decoder", False) and not architecture.endswith("EncoderModel"):
        return None
    if architecture == modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(kind):
        return (*_FROM_TEXT_TO_TEXT, *(_OF_ENCODERS if kind in T5_KINDS else ()))
    if kind in READING_KINDS and architecture.endswith(_READING_HEADS):
        return next(tasks for head, tasks in _HEADS.items() if architecture.endswith(head))
    is_encoder = kind in T5_KINDS and architecture.endswith("Model")
    return _OF_ENCODERS if is_encoder else ()


def _refuse_encoder_decoders(folder: Path, config: Any, architecture: str) -> None:
    """Refuses encoder-decoders for which no task is supported."""
    kind, name = config.model_type, architecture or config.model_type
    if _tasks_of_encoder_decoder(config, architecture) != ():
        return
    if kind in _WITH_OTHER_BIASES:
        raise _other_biases(folder, name)
    raise SetupError(
        f"{folder}: {name} has an encoder and a decoder; such models are supported to summarize or translate texts "
        "(BART, mBART, Marian, PEGASUS, T5), as classifiers and readers (BART, mBART, T5), and as encoders (T5)"
    )


def _other_biases(folder: Path, name: str) -> SetupError:
    return SetupError(
        f"{folder}: {name} is not supported: its attention depends on distances (position biases) in another way "
        "than that of T5"
    )


def _card(folder: Path) -> Mapping[str, Any]:
    path = folder / "README.md"
    try:
        return (metadata_load(path) if path.is_file() else None) or {}
    except Exception:  # README.md may have any content; without a front matter it is ignored
        return {}
