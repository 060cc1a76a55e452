"""What the compiler needs to know of a task: how its model is loaded, what sample inputs are, and what agreement means."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer, encode_batch, load_tokenizer

Batch: TypeAlias = Mapping[str, NDArray[Any]]  # int64 [batch, tokens], or uint8 [batch, 3, height, width]
Outputs: TypeAlias = Mapping[str, NDArray[Any]]
Measured: TypeAlias = NDArray[Any]  # one number or truth value for each text


@dataclass(frozen=True, slots=True)
class SourceTask:
    """A task. `load` makes the module of a model's folder, and raises SetupError for a model that cannot have the task.

    encode(module, texts) → a batch of sample inputs made of the texts, int64 [batch, tokens] by input name.
    measure(outputs, reference, batch) → how far each text's outputs are those of the original, 0 to 1, or None for a model to which that
    does not apply; combine(measured) → one number of all texts; `meaning` is that number in words. Images take the texts' places where
    the task is one of images.
    """

    load: Callable[[Path, SourceTokenizer], SourceModule]
    encode: Callable[[SourceModule, Sequence[str]], Batch]
    measure: Callable[[Outputs, Outputs, Batch], Measured | None]
    combine: Callable[[Measured], Any]
    meaning: str
    load_tokenizer: Callable[[Path], SourceTokenizer] = load_tokenizer


def encode_texts(module: SourceModule, texts: Sequence[str], before: Sequence[str] | None = None) -> Batch:
    """The texts as the model takes them, each behind its text of `before` where there are any."""
    encoded = encode_batch(module.tokenizer, [module.prompt + text for text in texts], module.max_tokens, before)
    return {name: np.asarray(encoded[name], np.int64) for name in module.tokenizer.input_names if name in encoded}
