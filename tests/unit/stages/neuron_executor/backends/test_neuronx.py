"""backends/neuronx.py on the contract double: cores that fail, and batches that fail on cores that are well."""

import asyncio
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.tensors import Array
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, CoreLost, compute
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from tests.unit.model_specs import model_spec

_SPEC = model_spec("question_answering")
_BUCKETS = ("1x8", "4x16")


class _Module(torch.nn.Module):
    """start_logits: the ids of tokens; end_logits: of those of the second text. Looks up every id, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding.from_pretrained(torch.arange(1000.0)[:, None])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.table(ids)[..., 0]
        return found * mask, found * types


@pytest.fixture
def sdk(neuron_double: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = importlib.import_module("torch_neuronx")
    monkeypatch.setenv("NEURON_DOUBLE_FOLDER", str(tmp_path / "neuron"))
    module._runtime.restart_process()
    neuron_runtime.cache_clear()
    yield module
    module._runtime.restart_process()
    neuron_runtime.cache_clear()


@pytest.fixture
def request_(sdk: Any, tmp_path: Path) -> BackendRequest:
    files = []
    for text in _BUCKETS:
        bucket = parse_bucket(text)
        example = tuple(torch.ones(bucket.batch, bucket.tokens, dtype=torch.int64) for _ in _SPEC.inputs)
        traced = sdk.trace(_Module().eval(), example, compiler_args="--target=inf2 --auto-cast=none", cpu_backend=True)
        files += [tmp_path / f"{text}.pt", tmp_path / f"{text}.json"]
        torch.jit.save(traced, files[-2])
        stamp = {"inputs": [{"name": name, "shape": [bucket.batch, bucket.tokens]} for name in _SPEC.inputs]}
        files[-1].write_text(json.dumps(stamp))
    versions = {"torch-neuronx": sdk.__version__}
    return BackendRequest(_SPEC, files, {}, 2, 0, buckets=tuple(map(parse_bucket, _BUCKETS)), versions=versions)


def _load(request: BackendRequest) -> Backend:
    module = importlib.import_module("neuronpipe.stages.neuron_executor.backends.neuronx")
    backend: Backend = module.NeuronxBackend(request)
    return backend


@pytest.fixture
def backend(request_: BackendRequest) -> Iterator[Backend]:
    backend = _load(request_)
    yield backend
    backend.close()


def _batch(*rows: list[int]) -> dict[str, Array]:
    ids = np.array(rows, np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def _fault(tmp_path: Path, core: int, status: str) -> Path:
    path = tmp_path / "neuron" / f"fault-core-{core}"
    path.write_text(status)
    return path


async def test_a_batch_is_filled_up_to_its_bucket_and_cut_to_what_it_was(backend: Backend) -> None:
    outputs = await compute(backend, 1, _batch([1, 2, 3], [4, 5, 6]))
    assert outputs["start_logits"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert outputs["end_logits"].tolist() == [[0, 0, 0], [0, 0, 0]]


async def test_a_replica_of_every_bucket_is_on_every_core(backend: Backend, sdk: Any) -> None:
    assert [core.loaded_bytes for core in sdk._runtime.runtime().cores] == [2 * 1000 * 4, 2 * 1000 * 4, 0, 0]


async def test_a_core_with_a_hardware_fault_is_lost_for_good_and_another_goes_on(
    backend: Backend, tmp_path: Path
) -> None:
    fault = _fault(tmp_path, 1, "101")
    with pytest.raises(CoreLost, match=r"core 1 was lost: .*status=101"):
        await compute(backend, 1, _batch([1]))
    fault.unlink()
    with pytest.raises(CoreLost):
        await compute(backend, 1, _batch([1]))
    assert (await compute(backend, 0, _batch([7])))["start_logits"].tolist() == [[7]]


async def test_a_lost_core_is_lost_for_every_model_on_it(
    backend: Backend, request_: BackendRequest, tmp_path: Path
) -> None:
    other = _load(request_)
    _fault(tmp_path, 0, "1201")
    with pytest.raises(CoreLost):
        await compute(backend, 0, _batch([1]))
    with pytest.raises(CoreLost) as lost:
        await compute(other, 0, _batch([1]))
    assert not lost.value.has_begun
    other.close()


async def test_of_batches_handed_to_a_core_at_once_it_is_lost_through_one(
    request_: BackendRequest, tmp_path: Path
) -> None:
    backend = _load(replace(request_, in_flight=2))
    _fault(tmp_path, 0, "101")
    lost = await asyncio.gather(
        compute(backend, 0, _batch([1])), compute(backend, 0, _batch([2])), return_exceptions=True
    )
    assert sorted(one.has_begun for one in lost if isinstance(one, CoreLost)) == [False, True]
    backend.close()


async def test_a_core_that_fails_a_batch_and_then_a_known_one_is_lost(backend: Backend, tmp_path: Path) -> None:
    _fault(tmp_path, 0, "5")  # a timeout, which may be anybody's fault
    with pytest.raises(CoreLost):
        await compute(backend, 0, _batch([1]))


async def test_a_batch_that_a_core_cannot_compute_leaves_the_core_as_it_was(backend: Backend) -> None:
    with pytest.raises(BackendError) as raised:
        await compute(backend, 0, _batch([1000]))  # the first id that is not in the table
    assert not isinstance(raised.value, CoreLost)
    assert (await compute(backend, 0, _batch([7])))["start_logits"].tolist() == [[7]]


async def test_a_batch_that_no_bucket_holds_is_refused_with_those_that_there_are(backend: Backend) -> None:
    with pytest.raises(BackendError, match="no bucket holds 5 x 3 tokens; there are: 1x8, 4x16"):
        await compute(backend, 0, _batch(*[[1, 2, 3]] * 5))


async def test_no_row_reaches_the_device_without_a_token(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, sdk: Any
) -> None:
    masks: list[torch.Tensor] = []
    execute = sdk._runtime.Core.execute

    def noted(self: Any, program: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        masks.append(inputs[1])
        outputs: list[torch.Tensor] = execute(self, program, inputs)
        return outputs

    monkeypatch.setattr(sdk._runtime.Core, "execute", noted)
    await compute(backend, 0, _batch([1, 2], [3, 4]))
    assert masks[0].shape == (4, 16)
    assert (masks[0].sum(dim=1) > 0).all()
