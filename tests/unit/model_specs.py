"""Small models for unit tests: only what a test says is out of the ordinary."""

from typing import Any

from neuronpipe.core.model import ImageSpec, ModelSpec, OutputSpec
from neuronpipe.tasks import TASKS

# Where it is not one logit.
_OUTPUTS = {
    "text_classification": (OutputSpec(name="logits", axes=(3,)),),
    "sentence_embedding": (OutputSpec(name="sentence_embedding", axes=(4,)),),
    "token_classification": (OutputSpec(name="logits", axes=("tokens", 5)),),
    "fill_mask": (OutputSpec(name="logits", axes=(6,)),),
    "feature_extraction": (OutputSpec(name="last_hidden_state", axes=("tokens", 4)),),
    "sentence_similarity": (OutputSpec(name="sentence_embedding", axes=(4,)),),
    "zero_shot_classification": (OutputSpec(name="logits", axes=(3,)),),
    "question_answering": (
        OutputSpec(name="start_logits", axes=("tokens",)),
        OutputSpec(name="end_logits", axes=("tokens",)),
    ),
    "image_classification": (OutputSpec(name="logits", axes=(3,)),),
    "text_generation": (),
    "summarization": (),
    "translation": (),
    "sparse_embedding": (OutputSpec(name="sparse_embedding", axes=(6,)),),
    "multi_vector_embedding": (OutputSpec(name="token_embeddings", axes=("tokens", 4)),),
    "image_embedding": (OutputSpec(name="image_embedding", axes=(4,)),),
    "zero_shot_token_classification": (OutputSpec(name="logits", axes=("tokens", 2, 64)),),
    "zero_shot_image_classification": (OutputSpec(name="embedding", axes=(4,)),),
}

# The facts without a default, and [CLS].
_FACTS: dict[str, dict[str, Any]] = {
    "sentence_embedding": {"embedding_dimensions": 4},
    "sentence_similarity": {"embedding_dimensions": 4},
    "feature_extraction": {"embedding_dimensions": 4},
    "image_embedding": {"embedding_dimensions": 4},
    "zero_shot_image_classification": {"scale": 10.0},
    "question_answering": {"cls_token_id": 1},
    "fill_mask": {"mask_token": "[M]", "mask_token_id": 3},
    "zero_shot_classification": {"entailment_id": 2},
    "zero_shot_token_classification": {
        "label_token_id": 3,
        "separator_token_id": 4,
        "before": (1,),
        "behind": (2,),
        "max_width": 2,
        "max_words": 8,
    },
    "multi_vector_embedding": {"embedding_dimensions": 4, "query": {"max_tokens": 8}, "document": {"max_tokens": 16}},
}
_LABELS = {"text_classification": ("a", "b", "c"), "token_classification": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")}


def model_spec(task: str = "text_classification", **changes: Any) -> ModelSpec:
    """A model of 16 tokens, with pad token 0 and [CLS] 1; labels a, b, c or entities, or vectors of four dimensions.

    `changes`: of the spec, or of the facts of its tasks.
    """
    kinds = {answered: TASKS[answered].facts for answered in (task, *changes.get("also_answers", ()))}
    named = {name: changes.pop(name) for kind in kinds.values() for name in kind.model_fields if name in changes}
    facts = {
        answered: kind(
            **_FACTS.get(answered, {}) | {name: value for name, value in named.items() if name in kind.model_fields}
        )
        for answered, kind in kinds.items()
    }
    described: dict[str, Any] = {
        "name": "small",
        "version": 1,
        "task": task,
        "architecture": "SmallModel",
        "inputs": ("input_ids", "attention_mask", "token_type_ids"),
        "outputs": _OUTPUTS.get(task, (OutputSpec(name="logits", axes=(1,)),)),
        "max_tokens": 16,
        "vocabulary_size": 1000,
        "pad_token_id": 0,
        "labels": _LABELS.get(task, ()),
        "facts": facts,
    }
    return ModelSpec(**described | changes)


def image_spec(task: str = "image_classification", **changes: Any) -> ModelSpec:
    """A model of images of 32 x 48 pixels, which count as 6 tokens."""
    image = ImageSpec(resize=(32, 48))
    described = {
        "inputs": ("pixels",),
        "image": image,
        "max_tokens": image.tokens,
        "vocabulary_size": 0,
        "labels": ("a", "b", "c"),
    }
    return model_spec(task, **described | changes)


def image_text_spec(**changes: Any) -> ModelSpec:
    """A model of images of 32 x 48 pixels and of texts of up to 16 tokens."""
    described = {"inputs": ("input_ids", "pixels", "places"), "image": ImageSpec(resize=(32, 48))}
    return model_spec("zero_shot_image_classification", **described | changes)
