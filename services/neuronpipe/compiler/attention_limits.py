"""How far the attention of a decoder reaches: the windows of its layers, and the length that its positions hold for."""

from typing import Any

from neuronpipe.core.errors import SetupError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of attention of each layer, by the names that transformers has for the masks of a model."""
    given = getattr(config, "layer_types", None)
    if given:
        return tuple(given)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (SLIDING if slides else FULL,) * int(config.num_hidden_layers)


def layer_windows(config: Any) -> tuple[int, ...]:
    """How many tokens each layer of a decoder sees, the last one included; 0: all of them."""
    window = int(getattr(config, "sliding_window", None) or 0)
    return tuple(window if kind == SLIDING else 0 for kind in layer_kinds(config))


def masks_by_kind(config: Any, masks: dict[int, Any]) -> Any:
    """What a decoder takes as its mask, of the masks by window: one, or one for each kind of its layers."""
    by_kind = {kind: masks[window] for kind, window in zip(layer_kinds(config), layer_windows(config), strict=True)}
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


def check_kinds(architecture: str, config: Any) -> None:
    """Raises SetupError for layers whose attention is neither full nor in a window."""
    if others := sorted({*layer_kinds(config)} - {FULL, SLIDING}):
        raise SetupError(
            f"{architecture} cannot be compiled for text generation: it has layers of {', '.join(others)}; "
            f"{FULL} and {SLIDING} are supported"
        )


def rotary_limit(config: Any) -> int | None:
    """The length up to which the angles of positions are those of a short text; None for a model without such a limit.

    A model with longrope turns all keys by other factors once its text is longer, those in the cache too. A graph has
    the factors of short texts. Source: longrope_frequency_update in transformers/modeling_rope_utils.py.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    several = [given, *(one for one in given.values() if isinstance(one, dict))]
    if all(one.get("rope_type", one.get("type")) != "longrope" for one in several):
        return None
    limits = [one.get("original_max_position_embeddings") for one in several]
    limits.append(getattr(config, "original_max_position_embeddings", None))
    return int(next((limit for limit in limits if limit), config.max_position_embeddings))
