"""tasks/decoding_checks.py: what no other stage makes is the caller's fault."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.tensors import Array
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.decoding_checks import check_decodable
from tests.unit.model_specs import model_spec

_LOGITS = np.zeros((3, 5), np.float32)
_PLACES = {name: np.arange(3, dtype=np.int32) for name in ("char_start", "char_end", "continues_word")}


def _check(outputs: list[Mapping[str, Array]], annotations: list[Mapping[str, Array]]) -> None:
    spec = model_spec("token_classification")
    check_decodable(TASKS["token_classification"], spec, annotations, outputs)


def test_what_the_stages_make_is_right() -> None:
    _check([{"logits": _LOGITS}], [_PLACES])


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [{}],
        [{"logits": _LOGITS.astype(np.int32)}],
        [{"logits": _LOGITS[0]}],
        [{"logits": _LOGITS[:, :1]}],
        [{"logits": _LOGITS[:0]}],
        [{"logits": np.zeros((100_000, 5), np.float32)}],
    ],
)
def test_wrong_outputs_are_refused(outputs: Any) -> None:
    with pytest.raises(InvalidInput):
        _check(outputs, [_PLACES] * len(outputs))


@pytest.mark.parametrize(
    "annotations",
    [
        [],
        [{}],
        [_PLACES, _PLACES],
        [_PLACES | {"char_end": np.zeros(2, np.int32)}],
        [_PLACES | {"char_end": np.zeros(3, np.float32)}],
        [_PLACES | {"char_start": np.full(3, -2, np.int32)}],
        [_PLACES | {"char_end": np.full(3, -1, np.int32)}],
    ],
)
def test_wrong_annotations_are_refused(annotations: Any) -> None:
    with pytest.raises(InvalidInput):
        _check([{"logits": _LOGITS}], annotations)
