"""A model's statistics in Triton's words, read from the process's metrics. All doors count there, so these do, too."""

from typing import Any

from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Counter, Family, Histogram, Labels, Meters
from neuronpipe.core.names import Metrics, Spans
from neuronpipe.core.tracing import status_name

_OK = status_name(None)
_HIT, _MISS = "hit_", "miss"
# Triton's names of the parts of a request.
_PARTS = {
    "queue": Spans.QUEUE,
    "compute_input": Spans.PREPROCESS,
    "compute_infer": Spans.COMPUTE,
    "compute_output": Spans.POSTPROCESS,
}


def statistics_of(meters: Meters, key: ModelKey) -> dict[str, Any]:
    """The message ModelStatistics of a model, without name and version. Batches are counted where the executor is in
    this process.
    """
    found = {family.instrument: _series(family, key) for family in meters.families()}
    requests, stages, results, batches = (
        found.get(instrument, {})
        for instrument in (Metrics.REQUEST_DURATION, Metrics.STAGE_DURATION, Metrics.RESULT_CACHE, Metrics.BATCH_SIZE)
    )
    times = {name: _sum(one for labels, one in stages.items() if labels == (part,)) for name, part in _PARTS.items()}
    return {
        "inference_count": times["compute_infer"]["count"],
        "execution_count": _sum(batches.values())["count"],
        "inference_stats": {
            "success": _sum(one for labels, one in requests.items() if labels == (_OK,)),
            "fail": _sum(one for labels, one in requests.items() if labels != (_OK,)),
            **times,
            "cache_hit": _sum(one for (word,), one in results.items() if word.startswith(_HIT)),
            "cache_miss": _sum(one for (word,), one in results.items() if word == _MISS),
        },
    }


def _series(family: Family, key: ModelKey) -> dict[Labels, Any]:
    """What an instrument has of a model, by the labels behind its name and version."""
    model = (key.name, str(key.version))
    return {labels[2:]: one for labels, one in family.series.items() if labels[:2] == model}


def _sum(series: Any) -> dict[str, int]:
    """How many there were, and how long they took in all; of a counter only how many."""
    total = {"count": 0, "ns": 0}
    for one in series:
        if isinstance(one, Histogram):
            total["count"] += sum(one.counts)
            total["ns"] += int(one.total)
        elif isinstance(one, Counter):
            total["count"] += int(one.value)
    return total
