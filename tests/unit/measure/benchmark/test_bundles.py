"""measure/benchmark/bundles.py: which compiled model a run finds."""

from pathlib import Path

import pytest

from neuronpipe.measure.benchmark import bundles
from neuronpipe.measure.benchmark.matrix import published_model


def test_a_bundle_of_other_buckets_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    model = published_model("bert-base-uncased")
    monkeypatch.setattr(bundles, "newest_bundle", lambda repository, name, backend: asked.append(repository))
    for buckets in (("1x16",), ("1x16", "1x128"), ("1x16",)):
        assert bundles.WantedBundle(model, "neuronx", "float32", buckets, tmp_path).find() is None
    first, other, again = asked
    assert first == again
    assert first != other
