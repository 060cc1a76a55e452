"""The agreement of an artefact's answers with the original's: one number from 0 to 1, which each task defines."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.compiler.modules import Batch, Outputs
from neuronpipe.compiler.tasks import SOURCE_TASKS


def agreement(
    task: str, outputs: Sequence[Outputs], reference: Sequence[Outputs], batches: Sequence[Batch]
) -> float | None:
    """The agreement over all texts of all batches.

    It is None for a model without one, such as a classifier with one label.
    """
    source_task = SOURCE_TASKS[task]
    measured = [
        source_task.measure(one, expected, batch)
        for one, expected, batch in zip(outputs, reference, batches, strict=True)
    ]
    of_texts = [one for one in measured if one is not None]
    return float(source_task.combine(np.concatenate(of_texts))) if of_texts else None


def meaning(task: str) -> str:
    """The meaning of the number, for a user."""
    return SOURCE_TASKS[task].meaning
