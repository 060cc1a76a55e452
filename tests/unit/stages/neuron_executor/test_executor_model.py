"""stages/neuron_executor/executor_model.py: outputs are cut to their sequences; others are refused."""

import numpy as np
import pytest

from neuronpipe.core.errors import InternalError
from neuronpipe.core.model import OutputSpec
from neuronpipe.stages.neuron_executor.executor_model import cut, fault_of
from tests.unit.model_specs import model_spec

_SPEC = model_spec(max_tokens=4)


def test_an_output_a_token_is_cut_to_the_sequences_own_tokens() -> None:
    spec = model_spec("question_answering")
    outputs = {name: np.arange(8, dtype=np.float32).reshape(2, 4) for name in ("start_logits", "end_logits")}
    expected = {"start_logits": [4, 5], "end_logits": [4, 5]}
    assert {name: array.tolist() for name, array in cut(outputs, 1, 2, spec.outputs).items()} == expected


def test_an_output_of_fixed_size_is_left_whole() -> None:
    outputs = {"logits": np.array([[1, 2, 3], [4, 5, 6]], np.float32)}
    assert cut(outputs, 1, 1, _SPEC.outputs)["logits"].tolist() == [4, 5, 6]


def test_only_the_tokens_axis_is_cut_of_an_output_with_two() -> None:
    spec = model_spec(outputs=(OutputSpec(name="states", axes=("tokens", 3)),))
    outputs = {"states": np.zeros((2, 4, 3), np.float32)}
    assert cut(outputs, 0, 2, spec.outputs)["states"].shape == (2, 3)


def test_what_is_cut_out_does_not_keep_the_batch_alive() -> None:
    outputs = {"logits": np.zeros((2, 3), np.float32)}
    assert not np.shares_memory(cut(outputs, 0, 1, _SPEC.outputs)["logits"], outputs["logits"])


def test_outputs_that_nobody_named_are_left_behind() -> None:
    outputs = {"logits": np.zeros((1, 3), np.float32), "hidden": np.zeros((1, 9), np.float32)}
    assert list(cut(outputs, 0, 1, _SPEC.outputs)) == ["logits"]


def test_one_output_that_is_not_a_number_is_a_fault_that_names_it() -> None:
    arrays = {"start_logits": np.zeros(2, np.float32), "end_logits": np.array([0, np.nan], np.float32)}
    fault = fault_of(arrays)
    assert isinstance(fault, InternalError)
    assert "'end_logits'" in fault.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_is_a_fault(value: float) -> None:
    assert isinstance(fault_of({"logits": np.array([0, value], np.float32)}), InternalError)


def test_finite_numbers_are_no_fault() -> None:
    assert fault_of({"logits": np.array([0.0, -1e30], np.float32)}) is None
