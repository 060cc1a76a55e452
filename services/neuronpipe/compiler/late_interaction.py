"""Reads a model of late interaction (ColBERT): the layers behind its encoder, and the tokens of queries and documents.

Sources: sentence-transformers 6, multi_vector_encoder/model.py and base/modules/transformer.py, which reads three
formats: its own, PyLate's, and the format of Stanford's ColBERT.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import (
    TOKENS,
    Layer,
    Normalize,
    read_dense,
    read_limits,
    read_modules,
    read_normalize,
    read_settings,
)
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.multi_vector_embedding import TextKind

_SAMPLE = "a text"
_EXPANSION_TOKENS = 32
_NORMALIZE = Layer(Normalize(), TOKENS, TOKENS)
# A file with any of these fields expands queries. Source: _parse_model_config of MultiVectorEncoder.
_PYLATE_FIELDS = (
    *("query_length", "document_length", "do_query_expansion", "query_prefix", "document_prefix", "skiplist_words"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens"),
)


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """A model of late interaction. `layers`: the layers behind the encoder, applied to each token."""

    model_folder: Path
    layers: Sequence[Layer]
    settings: Mapping[str, Any]
    max_tokens: int | None
    divides_by_tokens: bool = False

    def kind(self, name: str, tokenizer: SourceTokenizer, max_tokens: int) -> TextKind:
        """Returns the conversion of texts of a kind, query or document, to tokens. Raises SetupError."""
        transformers_tokenizer, settings = tokenizer.transformers_tokenizer, self.settings
        expansion = (settings.get("query_expansion") or {}) if name == "query" else {}
        length = int(expansion.get("length") or 0)
        limits = [settings.get(f"{name}_length"), max_tokens]
        if expansion.get("strategy") == "fixed":
            limits = [length, max_tokens]
        elif expansion:
            limits = [max(int(settings["query_length"]), length) if settings.get("query_length") else None, max_tokens]
        prefix_ids, prefix, place = _prefix(
            transformers_tokenizer, settings["prompts"].get(name) or "", settings["marks"]
        )
        skips = name in settings.get("skiplist_tasks", ("document",))
        return TextKind(
            max_tokens=min(int(limit) for limit in limits if limit),
            prefix=prefix,
            prefix_ids=prefix_ids,
            prefix_at=place,
            skipped_ids=_known_token_ids(transformers_tokenizer, settings.get("skiplist_words") or ()) if skips else (),
            expanded_to=min(length, max_tokens),
            expansion_id=_expansion_id(self.model_folder, transformers_tokenizer, expansion) if expansion else 0,
            sees_expansion=bool(expansion.get("attend")),
        )


def read_late_interaction(folder: Path) -> LateInteraction:
    """Reads a model. Raises SetupError if a module is not supported, or the projection layer is missing."""
    if (folder / "modules.json").is_file():
        return _read_modules(folder)
    if "HF_ColBERT" in (read_object(folder / "config.json").get("architectures") or ()):
        return _read_stanford(folder)
    raise SetupError(
        f"{folder}: is no model of late interaction: it has neither modules.json nor the architecture HF_ColBERT, and "
        "so no layer that makes the vectors that are compared"
    )


def _read_modules(folder: Path) -> LateInteraction:
    saved, model_folder = read_settings(folder), folder
    layers: list[Layer] = []
    settings: dict[str, Any] = {}
    modules = read_modules(folder, is_known=True)
    # sentence-transformers also adds the layers of PyLate to a folder that names no kind of model.
    is_pylate = saved.get("model_type") != "MultiVectorEncoder" and "MultiVectorMask" not in dict(modules)
    for kind, path in modules:
        module_settings = read_object(path / "config.json", may_lack=True)
        if kind == "Transformer":
            model_folder = path
            settings |= read_limits(path)
        elif kind == "Dense":
            layers.append(read_dense(path, TOKENS))
        elif kind == "Normalize" and module_settings.get("module_input_name") == TOKENS:
            layers.append(read_normalize(path))
        elif kind == "MultiVectorMask" and not module_settings.get("keep_only_token_ids"):
            settings |= module_settings
        else:
            advice = f"supported are Dense, Normalize of {TOKENS} and MultiVectorMask without keep_only_token_ids"
            raise SetupError(f"{folder}: has a module {kind} behind the token vectors; {advice}")
    if any({layer.reads, layer.writes} != {TOKENS} for layer in layers):
        raise SetupError(
            f"{folder}: one of its Dense modules is of other vectors than {TOKENS}, which is not supported"
        )
    if "message" in (settings.get("modality_config") or ()):
        raise SetupError(f"{folder}: writes texts into a chat template (modality_config has message), not supported")
    prompts = dict(saved.get("prompts") or {})
    marks = []
    if is_pylate:
        layers.append(_NORMALIZE)
        settings |= _pylate_settings(saved)
        for name in ("query", "document"):
            mark = saved.get(f"{name}_prefix") or ""
            marks.append(mark)
            prompts[name] = mark + (prompts.get(name) or "").removeprefix(mark)
    limit, is_mean = settings.get("max_seq_length"), saved.get("similarity_fn_name") == "meanmaxsim"
    settings |= {"prompts": prompts, "marks": marks}
    return LateInteraction(model_folder, layers, settings, limit, divides_by_tokens=is_mean)


def _pylate_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Converts PyLate's settings to the form of sentence-transformers since version 6."""
    words, is_named = saved.get("skiplist_words"), saved.get("model_type") == "ColBERT"
    skips_punctuation = words is None and (is_named or any(f"{name}_prefix" in saved for name in ("query", "document")))
    settings: dict[str, Any] = {
        "skiplist_words": list(string.punctuation) if skips_punctuation else words,
        "document_length": saved.get("document_length"),
    }
    if saved.get("do_query_expansion") is False or not any(name in saved for name in _PYLATE_FIELDS):
        return settings | {"query_length": saved.get("query_length")}
    attend = saved.get("attend_to_expansion_tokens", saved.get("attend_to_mask_tokens"))
    length = saved.get("query_length") or _EXPANSION_TOKENS
    return settings | {"query_expansion": _fixed_expansion(attend, length)}


def _fixed_expansion(attend: object, length: int) -> dict[str, Any]:
    return {"strategy": "fixed", "attend": bool(attend), "length": length}


def _read_stanford(folder: Path) -> LateInteraction:
    metadata = read_object(folder / "artifact.metadata", may_lack=True)
    length = metadata.get("query_maxlen") or _EXPANSION_TOKENS
    prompts = {
        "query": (metadata.get("query_token_id") or "[unused0]") + " ",
        "document": (metadata.get("doc_token_id") or "[unused1]") + " ",
    }
    settings = {
        "prompts": prompts,
        "marks": list(prompts.values()),
        "document_length": metadata.get("doc_maxlen"),
        "query_expansion": _fixed_expansion(metadata.get("attend_to_mask_tokens"), length),
        "skiplist_words": list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
    }
    return LateInteraction(folder, [Layer(_projection(folder), TOKENS, TOKENS), _NORMALIZE], settings, None)


def _projection(folder: Path) -> torch.nn.Module:
    """Loads the layer that Stanford's ColBERT has beside its encoder, under the name of linear.weight."""
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


def _prefix(tokenizer: Any, prompt: str, marks: Sequence[str]) -> tuple[tuple[int, ...], str, int]:
    """Splits a prompt into the tokens of its mark and the text behind it. Returns both, with the place of the mark's
    tokens, which is behind the first special tokens.

    A mark is one token, such as [Q], which the texts of callers cannot spell.
    """
    vocabulary = tokenizer.get_vocab()
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    candidates = [prompt, prompt.split(None, 1)[0] if prompt.split() else ""]
    mark_words = special | {word for mark in marks for word in (mark, mark.split(None, 1)[0] if mark.split() else "")}
    mark = next((word for word in candidates if word and word in mark_words and word in vocabulary), "")
    place = tokenizer(_SAMPLE)["input_ids"].index(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"][0])
    if not mark:
        return (), prompt, place
    # The space behind the mark stays with the text: byte-level BPE has it in the first word's token.
    return (vocabulary[mark],), prompt.removeprefix(mark), place


def _known_token_ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    numbers = [tokenizer.convert_tokens_to_ids(word) for word in words]
    ids_by_word = {word: number for word, number in zip(words, numbers, strict=True) if number is not None}
    return tuple(
        number
        for word, number in ids_by_word.items()
        if number != tokenizer.unk_token_id or word == tokenizer.unk_token
    )


def _expansion_id(folder: Path, tokenizer: Any, expansion: Mapping[str, Any]) -> int:
    token = expansion.get("token")
    number = tokenizer.convert_tokens_to_ids(token) if token else tokenizer.mask_token_id
    number = tokenizer.eos_token_id if number is None else number
    if number is None:
        raise SetupError(f"{folder}: expands queries, and its tokenizer has no mask token to do it with")
    return int(number)
