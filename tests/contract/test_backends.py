"""Every back end keeps the contract of neuron_executor/backends/base.py, on every test model."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from neuronpipe.bundles.compiler import COMPILERS
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.backends import BACKENDS, load_backend
from neuronpipe.neuron_executor.backends.base import Backend, LoadRequest
from neuronpipe.neuron_executor.batching import cut, pad
from tests.models import MODELS

_CORES = 2
# back end → by how much a row's outputs may differ with the shape of its batch, of the largest output.
_TOLERANCES = {
    "fake": 0.0,
    # Other shapes take other kernels, which add up float32 in another order: two layers of sums of 32 to 384 products of a relative
    # error of 6e-8 each, in the worst case all to one side.
    "openvino": 1e-5,
}
_SEED = 20261121


@dataclass(frozen=True)
class _Loaded:
    """A model on a back end."""

    name: str
    backend: Backend
    spec: ModelSpec
    tolerance: float

    def sequence(self, tokens: int, number: int = 0) -> Arrays:
        """A sequence of its own for each length and number."""
        generator = np.random.default_rng([_SEED, tokens, number])
        arrays = {"input_ids": generator.integers(0, self.spec.vocabulary_size, tokens).astype(np.int32)}
        if "token_type_ids" in self.spec.inputs:
            arrays["token_type_ids"] = (np.arange(tokens) > tokens // 2).astype(np.int32)
        return arrays

    def run(self, *sequences: Arrays, room: int = 0, core: int = 0) -> list[dict[str, Array]]:
        """The outputs of sequences in one batch, without padding; `room` asks for a longer batch than they need."""
        lengths = [len(arrays["input_ids"]) for arrays in sequences]
        padded = self.backend.round_tokens(max(*lengths, room))
        outputs = self.backend.run(core, pad(sequences, padded, self.spec))
        return [cut(outputs, row, tokens, self.spec) for row, tokens in enumerate(lengths)]

    def assert_equal(self, outputs: Arrays, expected: Arrays) -> None:
        """Equal but for what the back end's arithmetic may change."""
        for name, array in expected.items():
            np.testing.assert_allclose(outputs[name], array, rtol=0, atol=self.tolerance * float(np.abs(array).max()))


def _bundle(request: pytest.FixtureRequest, backend: str, model: str) -> Bundle:
    repository: Path = request.getfixturevalue({"fake": "fake_repository", "openvino": "repository"}[backend])
    return read_bundle(repository / model / "1")


@pytest.fixture(scope="module", params=[(backend, model) for backend in BACKENDS for model in MODELS], ids="-".join)
def loaded(request: pytest.FixtureRequest) -> Iterator[_Loaded]:
    name, model = request.param
    bundle = _bundle(request, name, model)
    artifact = bundle.artifact(name)
    load = LoadRequest(bundle.spec, bundle.artifact_files(artifact), artifact.properties, cores=_CORES, threads=_CORES)
    backend = load_backend(name, load)
    yield _Loaded(name, backend, bundle.spec, _TOLERANCES[name])
    backend.close()


def test_every_back_end_takes_part_here_and_can_be_compiled_for() -> None:
    assert set(BACKENDS) == set(_TOLERANCES) == set(COMPILERS)


def test_a_back_end_has_as_many_cores_as_asked_for(loaded: _Loaded) -> None:
    assert loaded.backend.cores == _CORES


def test_outputs_have_the_names_shapes_and_dtype_of_the_spec(loaded: _Loaded) -> None:
    padded = loaded.backend.round_tokens(9)
    outputs = loaded.backend.run(0, pad([loaded.sequence(9), loaded.sequence(4)], padded, loaded.spec))
    expected = {output.name: (2, *(padded if axis == "tokens" else axis for axis in output.axes)) for output in loaded.spec.outputs}
    assert {name: array.shape for name, array in outputs.items()} == expected
    assert {str(array.dtype) for array in outputs.values()} == {"float32"}


def test_padded_lengths_hold_their_sequences_and_grow_with_them_up_to_the_models_limit(loaded: _Loaded) -> None:
    lengths = range(1, loaded.spec.max_tokens + 1)
    padded = [loaded.backend.round_tokens(tokens) for tokens in lengths]
    assert all(tokens <= room <= loaded.spec.max_tokens for tokens, room in zip(lengths, padded, strict=True))
    assert padded == sorted(padded)


def test_outputs_are_numbers_for_the_shortest_and_the_longest_sequence(loaded: _Loaded) -> None:
    for tokens in (1, loaded.spec.max_tokens):
        (outputs,) = loaded.run(loaded.sequence(tokens))
        assert all(np.isfinite(array).all() for array in outputs.values())


def test_padding_does_not_change_a_sequences_outputs(loaded: _Loaded) -> None:
    sequence = loaded.sequence(5)
    (outputs,), (expected,) = loaded.run(sequence, room=60), loaded.run(sequence)
    loaded.assert_equal(outputs, expected)


def test_batch_mates_do_not_change_a_sequences_outputs(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (5, 17, 3, 40, 8)]
    for sequence, outputs in zip(sequences, loaded.run(*sequences), strict=True):
        (expected,) = loaded.run(sequence)
        loaded.assert_equal(outputs, expected)


def test_different_sequences_have_different_outputs(loaded: _Loaded) -> None:
    one, other = loaded.run(loaded.sequence(8, 1), loaded.sequence(8, 2))
    assert all(np.abs(one[name] - other[name]).max() > 10 * loaded.tolerance for name in one)


def test_every_input_of_the_model_counts(loaded: _Loaded) -> None:
    if loaded.name == "fake":
        pytest.skip("the fake looks at its token ids only")
    sequence = loaded.sequence(8)
    one, other = loaded.run(sequence, {"input_ids": sequence["input_ids"]})
    assert all(np.abs(one[name] - other[name]).max() > 10 * loaded.tolerance for name in one)


def test_the_same_batch_has_the_same_outputs_to_the_last_bit(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (5, 17, 3)]
    for outputs, again in zip(loaded.run(*sequences), loaded.run(*sequences), strict=True):
        for name, array in outputs.items():
            np.testing.assert_array_equal(again[name], array)


def test_every_core_gives_the_same_outputs(loaded: _Loaded) -> None:
    sequence = loaded.sequence(12)
    (first,), (last,) = loaded.run(sequence, core=0), loaded.run(sequence, core=_CORES - 1)
    loaded.assert_equal(last, first)


def test_outputs_are_not_overwritten_by_the_next_batch_of_the_core(loaded: _Loaded) -> None:
    outputs = loaded.backend.run(0, pad([loaded.sequence(8, 1)], loaded.backend.round_tokens(8), loaded.spec))
    kept = {name: array.copy() for name, array in outputs.items()}
    loaded.run(loaded.sequence(8, 2))
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, kept[name])


def test_inputs_are_left_as_they_were(loaded: _Loaded) -> None:
    batch = pad([loaded.sequence(8)], loaded.backend.round_tokens(8), loaded.spec)
    kept = {name: array.copy() for name, array in batch.items()}
    loaded.backend.run(0, batch)
    for name, array in batch.items():
        np.testing.assert_array_equal(array, kept[name])


def test_cores_that_run_at_once_do_not_disturb_each_other(loaded: _Loaded) -> None:
    sequences = [[loaded.sequence(8 + 5 * number, core) for number in range(6)] for core in range(_CORES)]
    expected = [[loaded.run(one)[0] for one in of_core] for of_core in sequences]
    together = threading.Barrier(_CORES)

    def run(core: int) -> list[dict[str, Array]]:
        outputs = []
        for one in sequences[core]:
            together.wait(20)
            outputs += loaded.run(one, core=core)
        return outputs

    with ThreadPoolExecutor(_CORES) as threads:
        for core, outputs in enumerate(threads.map(run, range(_CORES))):
            for one, alone in zip(outputs, expected[core], strict=True):
                loaded.assert_equal(one, alone)
