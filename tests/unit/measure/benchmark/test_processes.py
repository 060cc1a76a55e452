"""measure/benchmark/processes.py: which compiled model a run finds."""

from pathlib import Path

import pytest

from neuronpipe.measure.benchmark import processes
from neuronpipe.measure.benchmark.matrix import published_model


def test_a_bundle_of_other_buckets_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    model = published_model("bert-base-uncased")
    monkeypatch.setattr(processes, "newest_bundle", lambda repository, name, backend: asked.append(repository))
    for buckets in (("1x16",), ("1x16", "1x128"), ("1x16",)):
        assert processes.find_bundle(model, "neuronx", "float32", tmp_path, buckets) is None
    first, other, again = asked
    assert first == again
    assert first != other
