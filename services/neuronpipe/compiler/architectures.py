"""Special cases of some architectures, for which the compiler changes or checks a model.

The cases are the attention masks of decoders that make vectors and scores, decoders behind an encoder, the reach of
attention, batches without rows, experts, positions of images, and Longformer.
"""

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from neuronpipe.compiler.sentence_transformers import last_token
from neuronpipe.core.errors import SetupError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Returns the kind of attention of each layer, by the names that transformers has for the masks of a model."""
    if config.model_type == "gpt_neo":
        return tuple(SLIDING if kind == "local" else FULL for kind in config.attention_layers)
    if layer_types := getattr(config, "layer_types", None):
        return tuple(layer_types)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (SLIDING if slides else FULL,) * int(config.num_hidden_layers)


def layer_windows(config: Any) -> tuple[int, ...]:
    """Returns the number of tokens that each layer of a decoder sees, its own token included; 0: all tokens."""
    window = int(getattr(config, "window_size" if config.model_type == "gpt_neo" else "sliding_window", None) or 0)
    return tuple(window if kind == SLIDING else 0 for kind in layer_kinds(config))


def masks_by_kind(config: Any, masks: dict[int, Any]) -> Any:
    """Makes the mask argument of a decoder from the masks by window: one mask, or a mask for each kind of layers."""
    by_kind = {kind: masks[window] for kind, window in zip(layer_kinds(config), layer_windows(config), strict=True)}
    return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


@contextmanager
def replacing(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes of objects, each an object, a name and a value, until the block ends."""
    with ExitStack() as stack:
        for part, name, value in attributes:
            if name in vars(part):
                stack.callback(setattr, part, name, getattr(part, name))
            else:
                stack.callback(delattr, part, name)
            setattr(part, name, value)
        yield


@contextmanager
def taking_masks(model: Any, mask: Any) -> Iterator[Any]:
    """Makes a decoder use a mask of masks_by_kind, also GPT-Neo, and gives the argument to pass for it."""
    layers = model.base_model.h if model.config.model_type == "gpt_neo" else ()
    for layer, kind in zip(layers, layer_kinds(model.config) if layers else (), strict=True):
        seen = mask[kind] if isinstance(mask, dict) else mask
        layer.attn.attention._attn = lambda query, key, value, other, seen=seen: (
            scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=1.0),
            None,
        )
    try:
        yield seen if layers else mask
    finally:
        for layer in layers:
            del layer.attn.attention._attn


# Models whose layers have `sinks`. Source: modeling_*.py of transformers 5, none of which supports sdpa.
_WITH_SINKS = ("gpt_oss", "mimo_v2_flash", "deepseek_v4", "hy_v4", "flint", "granite_swa", "granitemoe_swa")


def check_kinds(architecture: str, config: Any) -> None:
    """Raises SetupError if a layer's attention is neither full nor in a window, or needs more than a mask."""
    reason, uncached = "", "which no back end computes with a cache in blocks; compile a model"
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        reason = f"its attention adds biases by distance (ALiBi), {uncached} with positions or rotary embeddings"
    elif config.model_type in _WITH_SINKS:
        learned = "its softmax has a further score that it learned (attention sinks)"
        reason = f"{learned}, {uncached} without sinks"
    elif getattr(config, "kv_lora_rank", None):
        compressed = "its cache holds compressed keys and values (multi-head latent attention)"
        reason = f"{compressed}, which no back end computes with in blocks; compile a model without, such as Qwen3"
    elif others := sorted({*layer_kinds(config)} - {FULL, SLIDING}):
        reason = f"it has layers of {', '.join(others)}; {FULL} and {SLIDING} are supported"
    if reason:
        raise SetupError(f"{architecture} cannot be compiled for text generation: {reason}")


def rotary_limit(config: Any) -> int | None:
    """Returns the length up to which positions have the angles of a short text; None for a model without such a limit.

    A model with longrope turns all keys by other factors once its text is longer, also the keys in the cache. A graph
    has the factors of short texts. Source: longrope_frequency_update in transformers/modeling_rope_utils.py.
    """
    rope_parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    groups = [rope_parameters, *(group for group in rope_parameters.values() if isinstance(group, dict))]
    if all(group.get("rope_type", group.get("type")) != "longrope" for group in groups):
        return None
    limits = [group.get("original_max_position_embeddings") for group in groups]
    limits.append(getattr(config, "original_max_position_embeddings", None))
    return int(next((limit for limit in limits if limit), config.max_position_embeddings))


def added_to_scores(is_seen: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Makes the mask that attention adds to its scores: `seen` for tokens that are seen, else the smallest number."""
    return torch.where(is_seen, seen, torch.finfo(dtype).min).to(dtype)


# The kinds of models whose layers are known to use the masks of this file.
MASKED_DECODERS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def decoder_inputs(model: Any, attention_mask: torch.Tensor) -> dict[str, Any]:
    """Makes the inputs beside the tokens for a decoder that makes vectors or scores instead of text.

    `attention_mask`: int64 [batch, tokens], 0 for padding, else 1. A mask is float [batch, 1, tokens, tokens]: 0 if a
    token may see another token. The masks are made here, because transformers leaves them out if a sample input has no
    padding. Sources: transformers 5, masking_utils.py and the forward of each model.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type == "mistral":  # only its window decides
        kinds = {SLIDING} if config.sliding_window else set()
    dtype = next(model.parameters()).dtype
    masks = {kind: _mask(config, attention_mask, kind == SLIDING, dtype) for kind in sorted(kinds or {FULL})}
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
    # Padding sees itself, because a softmax over nothing is NaN: in a window, padding would see no token.
    is_seen = (is_near[None, None] & attention_mask[:, None, None, :].bool()) | (distance == 0)[None, None]
    return added_to_scores(is_seen, dtype)


T5_KINDS = ("t5", "mt5", "umt5")
# The kinds whose classifiers and readers are served.
READING_KINDS = ("bart", "mbart", *T5_KINDS)


def has_decoder(model: Any) -> bool:
    """Returns whether the model is an encoder and a decoder; T5's encoder alone is not."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def shifted_inputs(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, Any]:
    """Returns the inputs of a decoder that reads its encoder's text again, shifted right by a token.

    `input_ids`, `attention_mask`: the inputs of the encoder, [batch, tokens]. The decoder's mask hides later tokens
    only: padding is behind the tokens that are read. Raises SetupError if the decoder has no token to begin with.
    Sources: shift_tokens_right of BART and mBART and _shift_right of T5 in transformers 5.
    """
    config = model.config
    if config.model_type == "mbart":  # begins with the last token, the language
        start = last_token(input_ids[:, :, None], attention_mask)
    elif config.decoder_start_token_id is None:
        problem = "config.json has no decoder_start_token_id, with which its decoder begins"
        raise SetupError(f"{config.name_or_path}: {problem}")
    else:
        start = torch.full_like(input_ids[:, :1], config.decoder_start_token_id)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    is_before = (places[:, None] >= places[None, :])[None, None]
    return {
        "decoder_input_ids": torch.cat([start, input_ids[:, :-1]], dim=1),
        "decoder_attention_mask": added_to_scores(is_before, next(model.parameters()).dtype),
        "use_cache": False,
    }


_VIEWS = (torch.Tensor.view, torch.Tensor.reshape)


class EmptyBatches(TorchFunctionMode):
    """Lets a model compute a batch without rows while it is entered.

    Models of transformers split and join axes by views with a length to be guessed (-1). In an empty tensor any length
    would fit. So the length is computed from the axes behind the first axis, which is the batch.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _VIEWS and not kwargs:
            tensor, *size_arguments = args
            sizes = list(size_arguments[0] if isinstance(size_arguments[0], (tuple, list)) else size_arguments)
            if -1 in sizes[1:]:
                place = sizes.index(-1)
                known_size = math.prod(sizes[1:place] + sizes[place + 1 :])
                sizes[place] = math.prod(tensor.shape[1:]) // known_size
                return func(tensor, sizes)
        if func is torch.Tensor.flatten and not kwargs and len(args) == 2 and args[1] > 0:
            tensor, start = args
            return tensor.reshape(*tensor.shape[:start], math.prod(tensor.shape[start:]))
        return func(*args, **(kwargs or {}))


def compute_by_expert(model: Any) -> None:
    """Makes the experts of a model's layers compute their own tokens from now on.

    OpenVINO cannot convert grouped_mm of transformers 5, and batched_mm copies weights for each token. Source:
    integrations/moe.py of transformers 5.
    """
    for part in model.modules():
        if hasattr(part, "is_transposed") and hasattr(part, "has_gate"):
            part.forward = types.MethodType(_by_expert, part)


def _by_expert(experts: Any, vectors: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes the experts' results for vectors, [tokens, width]. `chosen`, `weights`: [tokens, experts of a token]."""

    def projected(name: str, number: int, vectors: torch.Tensor) -> torch.Tensor:
        weight = getattr(experts, name)[number]
        bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
        return linear(vectors, weight.T if experts.is_transposed else weight, bias)

    result = torch.zeros_like(vectors)
    for number in range(experts.num_experts):
        rows = (chosen == number).any(1).nonzero()[:, 0]
        inner = projected("gate_up_proj" if experts.has_gate else "up_proj", number, vectors.index_select(0, rows))
        inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
        expert_output = projected("down_proj", number, inner)
        if getattr(experts, "has_post_expert_norm", False):
            expert_output = experts.post_expert_norm(expert_output)
        weight = torch.where(chosen == number, weights, 0.0).sum(1, keepdim=True).index_select(0, rows)
        result = result.index_add(0, rows, (expert_output * weight).to(result.dtype))
    return result


_METHOD, _BUFFER = "interpolate_pos_encoding", "fixed_positions"


def _positions(part: Any, embeddings: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return part.fixed_positions


@contextmanager
def fixing_positions(model: torch.nn.Module) -> Iterator[None]:
    """Fixes the positions of each part of a model of images to the positions that it computes within the context.

    DINOv2 interpolates the positions that it learned to the size of each image. A traced model always interpolates, and
    back ends round differently.
    """
    parts: list[Any] = [part for part in model.modules() if callable(getattr(part, _METHOD, None))]
    computed: dict[Any, torch.Tensor] = {}

    def record(part: Any, compute: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        computed[part] = positions = compute(*args, **options)
        return positions

    with replacing(*((part, _METHOD, partial(record, part, getattr(part, _METHOD))) for part in parts)):
        yield
    for part, positions in computed.items():
        part.register_buffer(_BUFFER, positions.clone(), persistent=False)
        # A method, so that a copy of the part has a method of the copy.
        setattr(part, _METHOD, types.MethodType(_positions, part))


def mask_windows(model: Any) -> None:
    """Makes a Longformer one graph for all lengths: full attention with a mask of the tokens beyond a token's window.

    transformers cuts texts into windows by their length in Python, which a trace cannot contain. The result is the
    same; the mask has a number for each pair of a text's tokens. Source: modeling_longformer.py.
    """
    encoder = model.base_model
    encoder.forward = types.MethodType(_encode, encoder)
    if type(model).__name__ == "LongformerForQuestionAnswering":
        model.register_forward_pre_hook(_see_questions, with_kwargs=True)


def _see_questions(model: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes the tokens of the question, which end at the first separator, see all others and be seen by them."""
    is_separator = inputs["input_ids"] == model.config.sep_token_id
    return args, inputs | {"global_attention_mask": (is_separator.cumsum(dim=1) == 0).to(torch.int64)}


def _encode(
    encoder: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    global_attention_mask: torch.Tensor | None = None,
    token_type_ids: torch.Tensor | None = None,
    **ignored: Any,
) -> Any:
    """Replaces LongformerModel.forward. `global_attention_mask`: 1 for tokens that see and are seen by all."""
    # The import takes seconds, which compilations of other models do not need.
    from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

    vectors = encoder.embeddings(input_ids=input_ids, token_type_ids=token_type_ids)
    is_text = attention_mask.bool()
    is_global = None if global_attention_mask is None else global_attention_mask.bool() & is_text
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    distance = (positions[:, None] - positions[None, :]).abs()
    for layer in encoder.encoder.layer:
        attention = layer.attention.self
        is_near = (distance <= attention.one_sided_attn_window_size)[None]
        if is_global is not None:
            is_near = is_near | is_global[:, None, :]
        # Padding sees itself, because a softmax over nothing is NaN.
        seen = is_near & is_text[:, None, :] | (distance == 0)[None]
        attended = _attend((attention.query, attention.key, attention.value), attention.num_heads, vectors, seen)
        if is_global is not None:
            parts = attention.query_global, attention.key_global, attention.value_global
            of_all = _attend(parts, attention.num_heads, vectors, is_text[:, None, :])
            attended = torch.where(is_global[:, :, None], of_all, attended)
        attended = layer.attention.output(attended, vectors)
        vectors = layer.output(layer.intermediate(attended), attended)
    pooled = None if encoder.pooler is None else encoder.pooler(vectors)
    return LongformerBaseModelOutputWithPooling(last_hidden_state=vectors, pooler_output=pooled)


def _attend(
    projections: tuple[torch.nn.Module, ...], heads: int, vectors: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Computes the attention of vectors [batch, tokens, width] to the tokens in `seen`.

    `seen`: bool [batch or 1, tokens or 1, tokens].
    """
    shape = (*vectors.shape[:2], heads, -1)
    query, key, value = (projection(vectors).view(shape).transpose(1, 2) for projection in projections)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    return attended.transpose(1, 2).reshape(vectors.shape)


# The first position of these families is the position after the padding id, which costs them positions. Source:
# create_position_ids_from_input_ids in each modeling file.
_POSITIONS_AFTER_PADDING = (
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer", "xmod", "data2vec-text"),
)


def positions(config: Any) -> int | None:
    """Returns the number of token positions of a model; None for a model of distances, which takes any length."""
    count = int(getattr(config, "max_position_embeddings", None) or 0)
    if count <= 0:
        return None
    if config.model_type in _POSITIONS_AFTER_PADDING:
        if config.pad_token_id is None:
            raise SetupError(f"{config.name_or_path}: config.json has no pad_token_id, after which positions begin")
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
    """Returns whether OpenVINO's attention spreads NaN of windows of padding, because a mask leaves padding no token.

    Such models have windows in both directions. ModernBERT gets masks of this file instead, except in transformers 4.
    The masks of eager attention are finite.
    """
    encoder = model.base_model
    if model.config.model_type == "modernbert":
        return hasattr(encoder, "_update_attention_mask")
    return hasattr(sys.modules[type(encoder).__module__], "create_bidirectional_sliding_window_mask")


def _mask_windows(
    encoder: Any, args: tuple[Any, ...], inputs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives ModernBERT its masks. In windows, padding sees itself. The mask of full attention has a single row."""
    mask, reach = inputs["attention_mask"], encoder.config.local_attention // 2
    row, column = (torch.arange(mask.shape[1], device=mask.device).view(shape) for shape in ((-1, 1), (1, -1)))
    is_text = mask[:, None, None, :].bool()
    is_near = (row <= column + reach) & (column <= row + reach)
    masks = {FULL: is_text, SLIDING: is_near & is_text | (row == column)}
    if encoder.config._attn_implementation == "eager":  # eager attention adds the masks to its scores
        masks = {kind: added_to_scores(seen, encoder.dtype) for kind, seen in masks.items()}
    return args, inputs | {"attention_mask": masks}


def _blank_padding(model: Any) -> None:
    """Makes MobileBERT, which sees each token's neighbours, see zeros at padding, as after the last token."""
    embeddings = model.base_model.embeddings
    original = embeddings.word_embeddings.weight
    weight = original.detach().clone()  # the original also belongs to the head of a masked language model
    weight[model.config.pad_token_id] = 0
    embeddings.word_embeddings = torch.nn.Embedding.from_pretrained(weight, freeze=not original.requires_grad)
