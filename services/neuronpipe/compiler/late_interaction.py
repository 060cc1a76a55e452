"""Reads a model of late interaction (ColBERT): what is behind its encoder, and how queries and documents become tokens.

Sources: sentence-transformers 6, multi_vector_encoder/model.py and base/modules/transformer.py, which reads the three
formats: its own, PyLate's and that of Stanford's ColBERT.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from neuronpipe.compiler.sentence_transformers import (
    read_dense,
    read_json,
    read_limits,
    read_modules,
    read_settings,
)
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.multi_vector_embedding import TextKind

_TOKENS = "token_embeddings"
_SAMPLE = "a text"
_ARTIFACT = "artifact.metadata"
_EXPANSION_TOKENS = 32


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """A model of late interaction. `layers` are behind its encoder, for each token."""

    model_folder: Path
    layers: Sequence[torch.nn.Module]
    settings: Mapping[str, Any]
    max_tokens: int | None
    divides_by_tokens: bool = False

    def kind(self, name: str, tokenizer: SourceTokenizer, max_tokens: int) -> TextKind:
        """How texts of a kind, query or document, become tokens. Raises SetupError."""
        own, settings = tokenizer.transformers_tokenizer, self.settings
        expansion = (settings.get("query_expansion") or {}) if name == "query" else {}
        length = int(expansion.get("length") or 0)
        limits = [settings.get(f"{name}_length"), max_tokens]
        if expansion.get("strategy") == "fixed":
            limits = [length, max_tokens]
        elif expansion:
            limits = [max(int(settings["query_length"]), length) if settings.get("query_length") else None, max_tokens]
        prefix_ids, prefix, place = _prefix(own, settings["prompts"].get(name) or "", settings["marks"])
        skips = name in settings.get("skiplist_tasks", ("document",))
        return TextKind(
            max_tokens=min(int(limit) for limit in limits if limit),
            prefix=prefix,
            prefix_ids=prefix_ids,
            prefix_at=place,
            skipped_ids=_known(own, settings.get("skiplist_words") or ()) if skips else (),
            expanded_to=min(length, max_tokens),
            expansion_id=_expansion_id(self.model_folder, own, expansion) if expansion else 0,
            sees_expansion=bool(expansion.get("attend")),
        )


def read_late_interaction(folder: Path) -> LateInteraction:
    """Raises SetupError for modules that are not supported, and for a model without the layer of one."""
    if (folder / "modules.json").is_file():
        return _read_modules(folder)
    if "HF_ColBERT" in (read_json(folder / "config.json").get("architectures") or ()):
        return _read_stanford(folder)
    raise SetupError(
        f"{folder}: is no model of late interaction: it has neither modules.json nor the architecture HF_ColBERT, and "
        "so no layer that makes the vectors that are compared"
    )


def _read_modules(folder: Path) -> LateInteraction:
    saved, model_folder = read_settings(folder), folder
    is_pylate = saved.get("model_type") == "ColBERT"
    layers: list[torch.nn.Module] = []
    settings: dict[str, Any] = {}
    for kind, path in read_modules(folder, is_known=True):
        own = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if kind == "Transformer":
            model_folder = path
            settings |= read_limits(path)
        elif kind == "Dense":
            layers.append(read_dense(path, _TOKENS))
        elif kind == "Normalize" and own.get("module_input_name") == _TOKENS:
            layers.append(_Normalize())
        elif kind == "MultiVectorMask" and not own.get("keep_only_token_ids"):
            settings |= own
        else:
            raise SetupError(
                f"{folder}: has a module {kind} behind the token vectors; supported are Dense, Normalize of "
                f"{_TOKENS} and MultiVectorMask without keep_only_token_ids"
            )
    if settings.get("do_lower_case") or "message" in settings.get("modality_config", ()):
        raise SetupError(f"{folder}: changes texts outside of its tokenizer (do_lower_case, or a chat template)")
    prompts = dict(saved.get("prompts") or {})
    marks = []
    if is_pylate:
        layers.append(_Normalize())
        settings |= _of_pylate(saved)
        for name in ("query", "document"):
            mark = saved.get(f"{name}_prefix") or ""
            marks.append(mark)
            prompts[name] = mark + (prompts.get(name) or "").removeprefix(mark)
    return LateInteraction(
        model_folder,
        layers,
        {**settings, "prompts": prompts, "marks": marks},
        settings.get("max_seq_length"),
        divides_by_tokens=saved.get("similarity_fn_name") == "meanmaxsim",
    )


def _of_pylate(saved: Mapping[str, Any]) -> dict[str, Any]:
    """PyLate's settings, as sentence-transformers has them since version 6."""
    words = saved.get("skiplist_words")
    found: dict[str, Any] = {
        "skiplist_words": list(string.punctuation) if words is None else words,
        "document_length": saved.get("document_length"),
    }
    if saved.get("do_query_expansion") is False:
        return found | {"query_length": saved.get("query_length")}
    attend = saved.get("attend_to_expansion_tokens", saved.get("attend_to_mask_tokens"))
    length = saved.get("query_length") or _EXPANSION_TOKENS
    return found | {"query_expansion": {"strategy": "fixed", "attend": bool(attend), "length": length}}


def _read_stanford(folder: Path) -> LateInteraction:
    metadata = read_json(folder / _ARTIFACT) if (folder / _ARTIFACT).is_file() else {}
    length = metadata.get("query_maxlen") or _EXPANSION_TOKENS
    prompts = {
        "query": (metadata.get("query_token_id") or "[unused0]") + " ",
        "document": (metadata.get("doc_token_id") or "[unused1]") + " ",
    }
    settings = {
        "prompts": prompts,
        "marks": list(prompts.values()),
        "document_length": metadata.get("doc_maxlen"),
        "query_expansion": {
            "strategy": "fixed",
            "attend": bool(metadata.get("attend_to_mask_tokens")),
            "length": length,
        },
        "skiplist_words": list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
    }
    return LateInteraction(folder, [_projection(folder), _Normalize()], settings, None)


class _Normalize(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vectors, p=2.0, dim=-1)


def _projection(folder: Path) -> torch.nn.Module:
    """The layer that Stanford's ColBERT has beside its encoder, under the name of linear.weight."""
    weight = None
    if (folder / "model.safetensors").is_file():
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            weight = file.get_tensor("linear.weight") if "linear.weight" in file.keys() else None  # noqa: SIM118
    elif (folder / "pytorch_model.bin").is_file():
        weight = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True).get("linear.weight")
    if weight is None:
        raise SetupError(f"{folder}: its weights lack linear.weight, the layer of ColBERT behind its encoder")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear.requires_grad_(False)


def _prefix(own: Any, prompt: str, marks: Sequence[str]) -> tuple[tuple[int, ...], str, int]:
    """A prompt as the tokens of its mark, the text behind it, and the place of the tokens: what special tokens come
    first.

    A mark is one token, as [Q], which the texts of callers cannot spell.
    """
    vocabulary = own.get_vocab()
    special = {token.content for token in own.added_tokens_decoder.values() if token.special}
    candidates = [prompt, prompt.split(None, 1)[0] if prompt.split() else ""]
    known = special | {one for mark in marks for one in (mark, mark.split(None, 1)[0] if mark.split() else "")}
    mark = next((one for one in candidates if one and one in known and one in vocabulary), "")
    place = own(_SAMPLE)["input_ids"].index(own(_SAMPLE, add_special_tokens=False)["input_ids"][0])
    if not mark:
        return (), prompt, place
    # The space behind it stays with the text: byte-level BPE has it in the first word's token.
    return (vocabulary[mark],), prompt.removeprefix(mark), place


def _known(own: Any, words: Sequence[str]) -> tuple[int, ...]:
    numbers = [own.convert_tokens_to_ids(word) for word in words]
    return tuple(
        number
        for word, number in zip(words, numbers, strict=True)
        if number is not None and (number != own.unk_token_id or word == own.unk_token)
    )


def _expansion_id(folder: Path, own: Any, expansion: Mapping[str, Any]) -> int:
    token = expansion.get("token")
    number = own.convert_tokens_to_ids(token) if token else own.mask_token_id
    number = own.eos_token_id if number is None else number
    if number is None:
        raise SetupError(f"{folder}: expands queries, and its tokenizer has no mask token to do it with")
    return int(number)
