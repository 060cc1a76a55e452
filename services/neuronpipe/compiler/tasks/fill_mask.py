"""Compiles for fill-mask: the logits of the whole vocabulary at one position of each sequence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.modules import Batch, Outputs, SourceModule, choosing, load_weights, source_module
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.fill_mask import FillMaskFacts

_POSITION = "mask_position"


class _AtPosition(torch.nn.Module):
    """A masked language model whose head sees one token of each row.

    It is the token at which `mask_position`, int64 [batch, tokens], is 1. A head works on each token by itself, so its
    result for one token is the same, at a fraction of the cost. The token is chosen by a select and a sum, which every
    compiler of static shapes supports, not by an index. A product would not work: ModernBERT can compute NaN for
    padding.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        mask_position: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids
        assert mask_position is not None  # noqa: S101 (the input that the module is made for)

        def choose(vectors: torch.Tensor) -> torch.Tensor:
            is_chosen = mask_position.bool().unsqueeze(-1)
            return torch.where(is_chosen, vectors, torch.zeros_like(vectors)).sum(dim=1, keepdim=True)

        with choosing(self.model.base_model, choose):
            logits = self.model(**inputs, return_dict=True)["logits"]
        return {"logits": logits[:, 0]}


def _load_fill_mask(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    own = tokenizer.transformers_tokenizer
    if own.mask_token_id is None:
        raise SetupError(f"{folder}: its tokenizer has no mask token, so there is nothing to fill")
    model = load_weights(transformers.AutoModelForMaskedLM, folder)
    facts = {"fill_mask": FillMaskFacts(mask_token=str(own.mask_token), mask_token_id=int(own.mask_token_id))}
    return source_module(
        _AtPosition(model), model, "fill_mask", tokenizer, outputs=("logits",), facts=facts, further_inputs=(_POSITION,)
    )


def _encode_fill_mask(module: SourceModule, texts: Sequence[str]) -> Batch:
    """The texts with a mask in place of one token in the middle."""
    batch = dict(encode_texts(module, texts))
    batch["input_ids"] = batch["input_ids"].copy()
    rows = np.arange(len(texts))
    middle = batch["attention_mask"].sum(axis=1) // 2
    batch[_POSITION] = np.zeros_like(batch["input_ids"])
    batch[_POSITION][rows, middle] = 1
    batch["input_ids"][rows, middle] = module.fact("mask_token_id")
    return batch


def _same_best_token(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    same: Measured = np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))
    return same


FILL_MASK = SourceTask(
    _load_fill_mask,
    _encode_fill_mask,
    _same_best_token,
    np.mean,
    "share of texts with the same best token in place of a mask",
)
