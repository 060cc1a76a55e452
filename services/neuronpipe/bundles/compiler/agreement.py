"""How far an artefact's answers are those of the original: one number from 0 to 1 for each task."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.bundles.compiler.samples import Batch

Outputs: TypeAlias = Mapping[str, NDArray[Any]]
_Measured: TypeAlias = NDArray[Any]  # one number or truth value for each text


def agreement(task: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[Batch]) -> float | None:
    """The agreement over all texts of all batches, or None for a model that has one label: its best is always the same."""
    measure, combine, _ = _BY_TASK[task]
    if task == "text_classification" and reference[0]["logits"].shape[1] == 1:
        return None
    texts = [measure(one, expected, batch) for one, expected, batch in zip(outputs, reference, batches, strict=True)]
    return float(combine(np.concatenate(texts)))


def meaning(task: str) -> str:
    """What the number is, in words for a person."""
    return _BY_TASK[task][2]


def _same_best_label(outputs: Outputs, reference: Outputs, batch: Batch) -> _Measured:
    same: _Measured = np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))
    return same


def _same_best_answer(outputs: Outputs, reference: Outputs, batch: Batch) -> _Measured:
    is_token = batch["attention_mask"] == 1
    same: _Measured = np.ones(len(is_token), np.bool_)
    for name in ("start_logits", "end_logits"):
        best, expected = (np.where(is_token, logits[name], -np.inf).argmax(axis=1) for logits in (outputs, reference))
        same = same & (best == expected)
    return same


def _cosine_similarity(outputs: Outputs, reference: Outputs, batch: Batch) -> _Measured:
    one, other = (vectors["sentence_embedding"].astype(np.float64) for vectors in (outputs, reference))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines: _Measured = (one * other).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return np.clip(cosines, 0, 1)  # rounding may exceed 1, and less than unrelated is no less wrong


_BY_TASK: dict[str, tuple[Callable[[Outputs, Outputs, Batch], _Measured], Callable[[_Measured], Any], str]] = {
    "text_classification": (_same_best_label, np.mean, "share of texts with the same best label"),
    "question_answering": (_same_best_answer, np.mean, "share of texts with the same best start and end"),
    "sentence_embedding": (_cosine_similarity, np.min, "smallest cosine similarity of a text's embeddings"),
}
