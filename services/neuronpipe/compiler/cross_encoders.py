"""Further tasks of a classifier of text pairs: reranking as a cross-encoder, and zero-shot classification.

Sources: sentence-transformers 6, cross_encoder/model.py (get_default_activation_fn); transformers,
pipelines/zero_shot_classification.py.
"""

from pathlib import Path
from typing import Any

from neuronpipe.compiler.sentence_transformers import default_prompt, read_settings
from neuronpipe.compiler.source_checks import check_labels
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.scores import ScoreFunctionName
from neuronpipe.tasks.zero_shot_classification import ZeroShotFacts

_ACTIVATIONS: dict[str, ScoreFunctionName] = {
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


def ranking(folder: Path, config: Any) -> RerankFacts:
    """The facts of a model for reranking. Raises SetupError for a model that cannot rank."""
    if config.num_labels != 1:
        raise SetupError(
            f"{folder}: has {config.num_labels} labels; a cross-encoder that ranks texts has one, the score"
        )
    return RerankFacts(score_function=score_function(folder, config), prompt=default_prompt(folder))


def score_function(folder: Path, config: Any) -> ScoreFunctionName:
    """How a cross-encoder makes scores of its logits. Raises SetupError."""
    activation = _activation(folder, config)
    if activation not in _ACTIVATIONS:
        raise SetupError(f"{folder}: makes scores of logits by {activation}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def entailing(folder: Path, config: Any) -> ZeroShotFacts:
    """The facts of a model for zero-shot classification. Raises SetupError for one without a label for entailment."""
    check_labels(folder, config)
    entailment = next((index for label, index in config.label2id.items() if label.lower().startswith("entail")), None)
    if entailment is None or config.num_labels < 2:
        labels = ", ".join(map(str, config.label2id))
        raise SetupError(
            f"{folder}: none of its labels begins with 'entail', or it is the only one; there are: {labels}. Zero-shot "
            "classification "
            "needs a model of entailment; if this is one, name its labels in config.json (id2label and label2id)"
        )
    return ZeroShotFacts(entailment_id=entailment)


def is_cross_encoder(folder: Path, config: Any) -> bool:
    """Whether sentence-transformers saved it as a cross-encoder."""
    return read_settings(folder).get("model_type") == "CrossEncoder" or any(
        hasattr(config, name) for name in ("sentence_transformers", "sbert_ce_default_activation_function")
    )


def _activation(folder: Path, config: Any) -> str:
    candidates = (
        read_settings(folder).get("activation_fn"),
        (getattr(config, "sentence_transformers", None) or {}).get("activation_fn"),
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    return next((str(candidate) for candidate in candidates if candidate), "torch.nn.modules.activation.Sigmoid")
