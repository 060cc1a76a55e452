"""Special cases of some architectures that the compiler needs to know. All others need nothing."""

from typing import Any

import torch

from neuronpipe.compiler.longformer import mask_windows

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
    """Changes a model so that one graph serves all lengths, and a text's outputs do not depend on its padding."""
    kind = model.config.model_type
    if kind == "longformer":
        mask_windows(model)
    if kind == "big_bird":
        model.base_model.set_attention_type("original_full")
    if kind == "mobilebert":
        _blank_padding(model)
    if kind == "modernbert" and not needs_eager_attention(model):
        model.base_model.register_forward_pre_hook(_mask_windows, with_kwargs=True)


def needs_eager_attention(model: Any) -> bool:
    """Whether OpenVINO's attention makes NaN of windows that hold nothing but padding, which spreads to tokens in the
    next layer: ModernBERT of transformers 4, which takes no masks of ours.
    """
    return model.config.model_type == "modernbert" and hasattr(model.base_model, "_update_attention_mask")


def _mask_windows(
    encoder: Any, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives ModernBERT its masks: in a window padding sees itself, and full attention needs no square of tokens."""
    mask, reach = inputs["attention_mask"], encoder.config.local_attention // 2
    one, other = (torch.arange(mask.shape[1], device=mask.device).view(shape) for shape in ((-1, 1), (1, -1)))
    is_text = mask[:, None, None, :].bool()
    is_near = (one <= other + reach) & (other <= one + reach)
    masks = {"full_attention": is_text, "sliding_attention": is_near & is_text | (one == other)}
    if encoder.config._attn_implementation == "eager":  # which adds them to its scores
        dtype = encoder.dtype
        masks = {kind: torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype) for kind, seen in masks.items()}
    return args, inputs | {"attention_mask": masks}


def _blank_padding(model: Any) -> None:
    """Makes MobileBERT see zeros at padding.

    For each token it also sees the neighbours, and after the last token zeros. Padding has to look like these.
    """
    embeddings = model.base_model.embeddings
    original = embeddings.word_embeddings.weight
    weight = original.detach().clone()  # the original belongs to the head of a masked language model as well
    weight[model.config.pad_token_id] = 0
    embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(weight, freeze=not original.requires_grad)
