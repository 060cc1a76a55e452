"""Every back end keeps the contract of stages/neuron_executor/backends/base.py, on every test model."""

import asyncio
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuronpipe.bundles.repository import read_bundle
from neuronpipe.compiler import COMPILERS
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import BACKENDS, load_backend
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, ByteBudget, compute
from neuronpipe.stages.neuron_executor.executor_model import cut
from neuronpipe.tasks.inputs.kind import input_kind
from tests.models.repository import MODELS, NEURONX_MODELS

_CORES = 2
# back end → by how much a row's outputs may differ with the shape of its batch, of the largest output.
_TOLERANCES = {
    "fake": 0.0,
    # Other shapes take other kernels, which add up float32 in another order: two layers of sums of 32 to 384 products
    # of a relative error of 6e-8 each, in the worst case all to one side.
    "openvino": 1e-5,
    "torch": 1e-5,
    "neuronx": 1e-5,  # the double computes with PyTorch
}
_SEED = 20261121
# All models are compiled for them.
_LONG = {"neuronx", "torch"}
# A model of each task for the double of Neuron, where each takes ten seconds to compile; the fourth would be a second
# classifier.
_BACKENDS = [pytest.param(name, marks=[pytest.mark.long] if name in _LONG else []) for name in BACKENDS]
_PAIRS = [
    pytest.param((backend, model), id=f"{backend}-{model}", marks=[pytest.mark.long] if backend in _LONG else [])
    for backend in BACKENDS
    for model in (NEURONX_MODELS if backend == "neuronx" else MODELS)
]


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
        if "mask_position" in self.spec.inputs:
            arrays["mask_position"] = (np.arange(tokens) == tokens // 2).astype(np.int32)
        return arrays

    def pad(self, *sequences: Arrays, padded_tokens: int) -> dict[str, Array]:
        """One batch."""
        return input_kind(self.spec).pad(sequences, padded_tokens)

    async def run(
        self, *sequences: Arrays, room: int = 0, core: int = 0, is_alone: bool = False
    ) -> list[dict[str, Array]]:
        """The outputs of sequences in one batch, without padding; `room` asks for a longer batch than they need."""
        lengths = [len(arrays["input_ids"]) for arrays in sequences]
        padded = self.backend.shapes.round_tokens(max(*lengths, room))
        outputs = await compute(self.backend, core, self.pad(*sequences, padded_tokens=padded), is_alone=is_alone)
        return [cut(outputs, row, tokens, self.spec.outputs) for row, tokens in enumerate(lengths)]

    def assert_equal(self, outputs: Arrays, expected: Arrays) -> None:
        """Equal but for what the back end's arithmetic may change."""
        for name, array in expected.items():
            np.testing.assert_allclose(outputs[name], array, rtol=0, atol=self.tolerance * float(np.abs(array).max()))


@contextmanager
def _loading(request: pytest.FixtureRequest, name: str, model: str) -> Iterator[_Loaded]:
    repository: Path = request.getfixturevalue({"openvino": "repository"}.get(name, f"{name}_repository"))
    bundle = read_bundle(repository / model / "1")
    artifact = bundle.artifact(name)
    with bundle.artifact_files(artifact) as files, pytest.MonkeyPatch.context() as patch:
        given = (bundle.spec, files, artifact.properties, _CORES, _CORES)
        compiled: Any = {"buckets": artifact.buckets, "versions": artifact.versions}
        load = BackendRequest(*given, lone_graphs=ByteBudget(1 << 30), **compiled)
        if name == "torch":  # on GPUs: test_architectures.py, with as many as there are
            patch.setattr(torch.cuda, "is_available", lambda: False)
        backend = load_backend(name, load)
    try:
        yield _Loaded(name, backend, bundle.spec, _TOLERANCES[name])
    finally:
        backend.close()


@pytest.fixture(scope="module", params=_PAIRS)
def loaded(request: pytest.FixtureRequest) -> Iterator[_Loaded]:
    with _loading(request, *request.param) as loaded:
        yield loaded


def test_every_back_end_takes_part_here_and_can_be_compiled_for() -> None:
    assert set(BACKENDS) == set(_TOLERANCES) == set(COMPILERS)


def test_a_back_end_has_as_many_cores_as_asked_for(loaded: _Loaded) -> None:
    assert loaded.backend.cores == _CORES


async def test_outputs_have_the_names_shapes_and_dtype_of_the_spec(loaded: _Loaded) -> None:
    padded = loaded.backend.shapes.round_tokens(9)
    outputs = await compute(loaded.backend, 0, loaded.pad(loaded.sequence(9), loaded.sequence(4), padded_tokens=padded))
    expected = {
        output.name: (2, *(padded if axis == "tokens" else axis for axis in output.axes))
        for output in loaded.spec.outputs
    }
    assert {name: array.shape for name, array in outputs.items()} == expected
    assert {str(array.dtype) for array in outputs.values()} == {"float32"}


@pytest.mark.parametrize("backend", _BACKENDS)
def test_back_ends_that_end_in_the_order_of_their_start_leave_signals_alone(
    request: pytest.FixtureRequest, backend: str
) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with ExitStack() as first, ExitStack() as second:
            for stack in (first, second):
                stack.enter_context(_loading(request, backend, "classifier"))
            first.close()
            second.close()
            gc.collect()
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert received == [signal.SIGUSR1]


def test_padded_lengths_hold_their_sequences_and_grow_with_them_up_to_the_models_limit(loaded: _Loaded) -> None:
    lengths = range(1, loaded.spec.max_tokens + 1)
    padded = [loaded.backend.shapes.round_tokens(tokens) for tokens in lengths]
    assert all(tokens <= room <= loaded.spec.max_tokens for tokens, room in zip(lengths, padded, strict=True))
    assert padded == sorted(padded)


async def test_outputs_are_numbers_for_the_shortest_and_the_longest_sequence(loaded: _Loaded) -> None:
    for tokens in (1, loaded.spec.max_tokens):
        (outputs,) = await loaded.run(loaded.sequence(tokens))
        assert all(np.isfinite(array).all() for array in outputs.values())


async def test_padding_does_not_change_a_sequences_outputs(loaded: _Loaded) -> None:
    sequence = loaded.sequence(5)
    (outputs,), (expected,) = await loaded.run(sequence, room=60), await loaded.run(sequence)
    loaded.assert_equal(outputs, expected)


async def test_batch_mates_do_not_change_a_sequences_outputs(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (5, 17, 3, 40, 8)]
    for sequence, outputs in zip(sequences, await loaded.run(*sequences), strict=True):
        (expected,) = await loaded.run(sequence)
        loaded.assert_equal(outputs, expected)


async def test_different_sequences_have_different_outputs(loaded: _Loaded) -> None:
    first, second = await loaded.run(loaded.sequence(8, 1), loaded.sequence(8, 2))
    assert all(np.abs(first[name] - second[name]).max() > 10 * loaded.tolerance for name in first)


async def test_every_input_of_the_model_counts(loaded: _Loaded) -> None:
    if loaded.name == "fake":
        pytest.skip("the fake looks at its token ids only")
    sequence = loaded.sequence(8)
    whole, partial = await loaded.run(sequence, {"input_ids": sequence["input_ids"]})
    assert all(np.abs(whole[name] - partial[name]).max() > 10 * loaded.tolerance for name in whole)


async def test_the_same_batch_has_the_same_outputs_to_the_last_bit(loaded: _Loaded) -> None:
    sequences = [loaded.sequence(tokens) for tokens in (5, 17, 3)]
    for outputs, again in zip(await loaded.run(*sequences), await loaded.run(*sequences), strict=True):
        for name, array in outputs.items():
            np.testing.assert_array_equal(again[name], array)


async def test_every_core_gives_the_same_outputs(loaded: _Loaded) -> None:
    sequence = loaded.sequence(12)
    (first,), (last,) = await loaded.run(sequence, core=0), await loaded.run(sequence, core=_CORES - 1)
    loaded.assert_equal(last, first)


async def test_a_batch_that_is_alone_gives_the_same_outputs(loaded: _Loaded) -> None:
    sequence = loaded.sequence(12)
    (expected,) = await loaded.run(sequence)
    for _ in range(16):
        (outputs,) = await loaded.run(sequence, is_alone=True)
        loaded.assert_equal(outputs, expected)
    # OpenVINO compiles a graph of the length, for those to come.
    while loaded.name == "openvino" and not loaded.backend.lone_graphs:
        await asyncio.sleep(0.01)
    (outputs,) = await loaded.run(sequence, is_alone=True)
    loaded.assert_equal(outputs, expected)
    assert set(loaded.backend.lone_graphs) <= {loaded.backend.shapes.round_tokens(12)}


async def test_outputs_are_not_overwritten_by_the_next_batch_of_the_core(loaded: _Loaded) -> None:
    outputs = await compute(
        loaded.backend, 0, loaded.pad(loaded.sequence(8, 1), padded_tokens=loaded.backend.shapes.round_tokens(8))
    )
    kept = {name: array.copy() for name, array in outputs.items()}
    await loaded.run(loaded.sequence(8, 2))
    for name, array in outputs.items():
        np.testing.assert_array_equal(array, kept[name])


async def test_inputs_are_left_as_they_were(loaded: _Loaded) -> None:
    batch = loaded.pad(loaded.sequence(8), padded_tokens=loaded.backend.shapes.round_tokens(8))
    kept = {name: array.copy() for name, array in batch.items()}
    await compute(loaded.backend, 0, batch)
    for name, array in batch.items():
        np.testing.assert_array_equal(array, kept[name])


async def test_cores_that_run_at_once_do_not_disturb_each_other(loaded: _Loaded) -> None:
    sequences = [[loaded.sequence(8 + 5 * number, core) for core in range(_CORES)] for number in range(6)]
    for together in sequences:
        alone = [(await loaded.run(sequence))[0] for sequence in together]
        at_once = await asyncio.gather(*(loaded.run(sequence, core=core) for core, sequence in enumerate(together)))
        for (outputs,), expected in zip(at_once, alone, strict=True):
            loaded.assert_equal(outputs, expected)


async def test_a_batch_that_runs_does_not_hold_up_the_event_loop(loaded: _Loaded) -> None:
    if loaded.name == "fake":
        pytest.skip("the fake's batches take no time")
    running = asyncio.create_task(
        loaded.run(*(loaded.sequence(min(loaded.spec.max_tokens, 128), number) for number in range(16)))
    )
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    # A turn takes microseconds, the batch milliseconds. One that blocked the loop would leave two or three turns,
    # around the batch.
    assert turns > 10
    await running


async def test_a_batch_is_made_and_taken_apart_where_it_is_computed_and_not_on_the_event_loop(loaded: _Loaded) -> None:
    if loaded.name == "fake":
        pytest.skip("the fake has no thread")
    batch = loaded.pad(loaded.sequence(8), padded_tokens=loaded.backend.shapes.round_tokens(8))
    free, threads = threading.Event(), list[int]()

    def prepare() -> Arrays:
        assert free.wait(20)  # a loop that waited for this could not let it go on
        threads.append(threading.get_ident())
        return batch

    def finish(outputs: Arrays) -> int:
        threads.append(threading.get_ident())
        return len(outputs)

    running = asyncio.create_task(loaded.backend.run(0, prepare, finish))
    await asyncio.sleep(0.01)
    free.set()
    assert await running == len(loaded.spec.outputs)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_what_making_a_batch_or_taking_it_apart_raises_is_raised_as_it_is(loaded: _Loaded) -> None:
    batch = loaded.pad(loaded.sequence(8), padded_tokens=loaded.backend.shapes.round_tokens(8))

    def fail(outputs: Arrays = batch) -> Arrays:
        raise ZeroDivisionError

    for prepare, finish in ((fail, len), (lambda: batch, fail)):
        with pytest.raises(ZeroDivisionError):
            await loaded.backend.run(0, prepare, finish)
    await loaded.run(loaded.sequence(8))


async def test_a_batch_that_cannot_be_computed_raises_and_leaves_the_core_as_it_was(loaded: _Loaded) -> None:
    # Rows of eight ids and of nine in the mask. (Not too many positions: OpenVINO reads beyond its tables then, and
    # crashes later.)
    broken = {name: np.ones((2, 9 if name == "attention_mask" else 8), np.int64) for name in loaded.spec.inputs}
    (expected,) = await loaded.run(loaded.sequence(20))
    with pytest.raises(BackendError):
        await asyncio.wait_for(compute(loaded.backend, 0, broken), 60)
    (outputs,) = await loaded.run(loaded.sequence(20))
    loaded.assert_equal(outputs, expected)


@pytest.mark.parametrize("name", _BACKENDS)
async def test_closing_waits_for_batches_that_no_caller_waits_for(request: pytest.FixtureRequest, name: str) -> None:
    with _loading(request, name, "classifier") as loaded:
        running = asyncio.create_task(
            loaded.run(*(loaded.sequence(loaded.spec.max_tokens, number) for number in range(16)))
        )
        await asyncio.sleep(0)  # it has begun
        running.cancel()
        await asyncio.wait([running])
    # Nothing is left to see; a device freed under a batch ends the process.
