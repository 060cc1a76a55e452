"""The attention masks of decoders that make vectors and scores in place of text.

Sources: transformers 5, masking_utils.py and the forward of each model.
"""

from typing import Any

import torch

# The kinds whose layers are known to see what is written here.
MASKED_DECODERS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def decoder_inputs(model: Any, attention_mask: torch.Tensor) -> dict[str, Any]:
    """What a decoder takes beside its tokens, from int64 [batch, tokens], 1 for each token that is not padding.

    A mask is float [batch, 1, tokens, tokens]: 0 where a token may see another one. It is made here, because
    transformers leaves it out where a sample input has no padding.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type == "mistral":  # it goes by its window alone
        kinds = {"sliding_attention"} if config.sliding_window else set()
    dtype = next(model.parameters()).dtype
    masks = {kind: _mask(config, attention_mask, kind == "sliding_attention", dtype) for kind in sorted(kinds)}
    if not masks:
        masks = {"full_attention": _mask(config, attention_mask, False, dtype)}
    return {"attention_mask": masks if len(masks) > 1 else next(iter(masks.values())), "use_cache": False}


def _mask(config: Any, attention_mask: torch.Tensor, slides: bool, dtype: torch.dtype) -> torch.Tensor:
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    distance = positions[:, None] - positions[None, :]
    if not getattr(config, "is_causal", True):
        is_near = distance.abs() <= config.sliding_window if slides else distance == distance
    elif getattr(config, "use_bidirectional_attention", False):
        is_near = distance.abs() < config.sliding_window if slides else distance == distance
    else:
        is_near = (distance >= 0) & (distance < config.sliding_window) if slides else distance >= 0
    # Padding sees itself, where it would see nothing in a window: of nothing a softmax is NaN.
    is_seen = (is_near[None, None] & attention_mask[:, None, None, :].bool()) | (distance == 0)[None, None]
    return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)
