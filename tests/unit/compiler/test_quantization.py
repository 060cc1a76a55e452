"""compiler/quantization.py: as few parts in float32 as it takes, in the order that they are ranked in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler import accuracy, quantization
from neuronpipe.compiler.conversion import Ran

_PARTS = ("a", "b", "c", "d", "e")
# What each part adds to the outputs' error while it computes in int8.
_ERRORS = {"a": 0.1, "b": 0.5, "c": 0.2, "d": 0.0, "e": 0.4}


class _Quantizer:
    """Describes what was asked of it."""

    parts = _PARTS

    def quantize(self, float_parts: Sequence[str] = ()) -> Artifact:
        return Artifact(backend="openvino", dtype="int8", float_parts=tuple(float_parts))


def _error(artifact: Artifact) -> float:
    return sum(error for part, error in _ERRORS.items() if part not in artifact.float_parts)


class _Compiler:
    """Computes outputs that are off by the errors of the parts in int8."""

    def run(self, conversion: Any, artifact: Artifact, batches: Sequence[Any]) -> Ran:
        return Ran([{"logits": np.full((1, 2), _error(artifact))} for _ in batches], "int8")


class _Conversion:
    module = None


def test_parts_are_ranked_by_the_error_that_they_take_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        accuracy, "reference_outputs", lambda module, batches: [{"logits": np.zeros((1, 2))} for _ in batches]
    )
    quantizer, compiler, conversion = _Quantizer(), _Compiler(), _Conversion()
    ranked = quantization.rank(quantizer, compiler, conversion, [{}] * 100)  # type: ignore[arg-type]
    assert ranked == ["b", "e", "c", "a", "d"]


def _measured(artifact: Artifact) -> Accuracy:
    agreement = 1 - _error(artifact) / 2
    return Accuracy(
        samples=1,
        sample_shapes=((1, 1),),
        largest_output=1,
        largest_difference=0,
        computed_dtype="int8",
        agreement=agreement,
    )


@pytest.mark.parametrize(
    ("min_agreement", "parts"),
    # By hand: 1.2 in all; without b 0.7, without e 0.3, without c 0.1, without a 0. Half of that is missing from 1.
    [(0.6, "b"), (0.64, "b"), (0.66, "be"), (0.85, "be"), (0.9, "bec"), (0.96, "beca")],
)
def test_as_few_parts_as_it_takes_are_in_float32(min_agreement: float, parts: str) -> None:
    artifact, measured = quantization.search(_Quantizer(), ["b", "e", "c", "a", "d"], _measured, min_agreement)  # type: ignore[arg-type]
    assert artifact.float_parts == tuple(parts)
    assert measured == _measured(artifact)


def test_where_none_is_enough_all_are_in_float32() -> None:
    def measure(artifact: Artifact) -> Accuracy:
        return _measured(artifact).model_copy(update={"agreement": 0.5})

    artifact, _ = quantization.search(_Quantizer(), ["b", "e", "c", "a", "d"], measure, 0.99)  # type: ignore[arg-type]
    assert artifact.float_parts == ("b", "e", "c", "a", "d")
