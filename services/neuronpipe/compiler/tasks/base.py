"""The contract of a task in the compiler: how its model is loaded, its sample inputs, and its agreement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.compiler.modules import MASK, Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.tokenizers import SourceTokenizer, encode_batch, load_tokenizer
from neuronpipe.core.model import ADAPTER
from neuronpipe.tasks.base import PROMPT_TOKENS

Measured: TypeAlias = NDArray[Any]  # a number or truth value for each text


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A task. `load` makes the module of a model's folder, and raises SetupError for a model that cannot have the task.

    - `encode(module, texts)` → a batch of sample inputs, int64 [batch, tokens] by input name.
    - `measure(outputs, reference, batch)` → the agreement of each text's outputs with the original's outputs, 0 to 1,
      or None for a model without an agreement.
    - `combine(measured)` → a number for all texts.
    - `meaning`: the meaning of that number, for a user.

    Tasks of images use images instead of texts.
    """

    load: Callable[[Path, SourceTokenizer], SourceModule]
    encode: Callable[[SourceModule, Sequence[str]], SampleBatch]
    measure: Callable[[Outputs, Outputs, SampleBatch], Measured | None]
    combine: Callable[[Measured], Any]
    meaning: str
    load_tokenizer: Callable[[Path], SourceTokenizer] = load_tokenizer


def encode_texts(module: SourceModule, texts: Sequence[str], before: Sequence[str] | None = None) -> SampleBatch:
    """Encodes the texts as inputs of the model, each after its text of `before`, if given."""
    encoded = encode_batch(module.tokenizer, [module.prompt + text for text in texts], module.max_tokens, before)
    names = {*module.tokenizer.input_names, MASK}
    batch = {name: np.asarray(encoded[name], np.int64) for name in encoded if name in names}
    if PROMPT_TOKENS in module.inputs:  # as for a prompt of a few tokens
        tokens = batch["attention_mask"].sum(axis=1, keepdims=True)
        batch[PROMPT_TOKENS] = (np.arange(batch["input_ids"].shape[1]) < np.minimum(tokens // 2, 3)).astype(np.int64)
    if ADAPTER in module.inputs:  # the rows have the base and each adapter in turn
        numbers = np.arange(len(texts))[:, None] % (1 + len(module.adapters))
        batch[ADAPTER] = np.broadcast_to(numbers, batch["input_ids"].shape).astype(np.int64)
    return batch
