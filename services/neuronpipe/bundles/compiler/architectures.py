"""Special cases of some architectures that the compiler needs to know. All others need nothing."""

from typing import Any

import torch

from neuronpipe.core.errors import SetupError

# The first position is the one after the padding id in these families, which costs them positions.
# Source: create_position_ids_from_input_ids in each one's modeling file.
_POSITIONS_AFTER_PADDING = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "mpnet",
    "longformer",
    "xmod",
    "data2vec-text",
}

# Windows of local attention that hold nothing but padding: OpenVINO's attention makes them NaN, which spreads to tokens
# in the next layer.
NEED_EAGER_ATTENTION = frozenset({"modernbert"})


def positions(config: Any) -> int | None:
    """The number of token positions that a model distinguishes; None if it uses distances, so that any number works."""
    count = int(getattr(config, "max_position_embeddings", None) or 0)
    if count <= 0:
        return None
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return count - int(config.pad_token_id) - 1
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        # Up to this length transformers computes full attention for every type, and so does neuronpipe. Source:
        # BigBirdModel.forward.
        return min(count, (5 + 2 * int(config.num_random_blocks)) * int(config.block_size))
    return count


def prepare(model: Any) -> None:
    """Changes a model so that one graph serves all lengths, and a text's outputs do not depend on its padding.

    Raises SetupError for a model for which this is not possible.
    """
    kind = model.config.model_type
    if kind == "longformer":
        raise SetupError(
            "Longformer cuts texts into windows by their length in Python, which no graph for all lengths can hold; it "
            "is not supported"
        )
    if kind == "big_bird":
        model.base_model.set_attention_type("original_full")
    if kind == "mobilebert":
        _blank_padding(model)


def _blank_padding(model: Any) -> None:
    """Makes MobileBERT see zeros at padding.

    For each token it also sees the neighbours, and after the last token zeros. Padding has to look like these.
    """
    embeddings = model.base_model.embeddings
    original = embeddings.word_embeddings.weight
    weight = original.detach().clone()  # the original belongs to the head of a masked language model as well
    weight[model.config.pad_token_id] = 0
    embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(weight, freeze=not original.requires_grad)
