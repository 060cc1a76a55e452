"""Labels of a request, each put into a sentence that is true if the label fits."""

from collections.abc import Sequence

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import LabelScore
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Array
from neuronpipe.tasks.base import check_text
from neuronpipe.tasks.many_texts import check_texts

_PLACE = "{}"


def check_hypotheses(labels: Sequence[str], template: str) -> None:
    """Refuses labels that are no texts, and a template without exactly one place. An empty template is the default."""
    check_texts("candidate_labels", labels)
    if not template:
        return
    check_text("hypothesis_template", template)
    places = template.count(_PLACE)
    if places != 1:
        raise InvalidInput("hypothesis_template", f"must have exactly one {_PLACE} for the label; it has {places}")
    if "{" in template.replace(_PLACE, "") or "}" in template.replace(_PLACE, ""):
        raise InvalidInput("hypothesis_template", f"has a brace other than {_PLACE}")


def hypotheses(labels: Sequence[str], template: str) -> list[str]:
    """The sentence of each label."""
    before, _, after = template.partition(_PLACE)
    return [before + label + after for label in labels]


def ranked_labels(labels: Sequence[str], scores: Array) -> list[LabelScore]:
    """All labels with their scores, best first; those of equal score stay in their order."""
    order = np.argsort(-scores, kind="stable")
    ranked = zip(order.tolist(), scores[order].tolist(), strict=True)
    return [LabelScore(label=labels[index], score=score) for index, score in ranked]
