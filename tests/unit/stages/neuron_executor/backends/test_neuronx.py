"""backends/neuronx.py on the contract double: cores and steps that fail, on cores that are well and on others."""

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.core.tensors import Array
from neuronpipe.stages.neuron_executor.backends import load_decoder
from neuronpipe.stages.neuron_executor.backends.base import Backend, BackendError, BackendRequest, CoreLost, compute
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel, DecoderRun
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


async def test_a_core_with_a_hardware_fault_is_lost_and_another_goes_on(backend: Backend, tmp_path: Path) -> None:
    fault = _fault(tmp_path, 1, "101")
    with pytest.raises(CoreLost, match=r"core 1 was lost: .*status=101"):
        await compute(backend, 1, _batch([1]))
    fault.unlink()
    with pytest.raises(CoreLost):
        await compute(backend, 1, _batch([1]))
    assert (await compute(backend, 0, _batch([7])))["start_logits"].tolist() == [[7]]


async def test_a_lost_core_is_lost_for_every_model(backend: Backend, request_: BackendRequest, tmp_path: Path) -> None:
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


async def test_no_row_is_computed_without_a_token(backend: Backend, monkeypatch: pytest.MonkeyPatch, sdk: Any) -> None:
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


_BUCKET, _CHUNK_TOKENS = parse_bucket("3x16"), 4


class _Sums(torch.nn.Module):
    """The scores after a token are the sum of all tokens in its slot. Single tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.nn.Parameter(torch.zeros(_BUCKET.batch), requires_grad=False)
        self.table = torch.nn.Embedding.from_pretrained(torch.arange(100.0)[:, None])

    def forward(
        self, token_ids: torch.Tensor, past: torch.Tensor, chunk: torch.Tensor, sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        new = self.table(token_ids[0, : _BUCKET.batch])[:, 0]
        before = torch.where(past == 0, 0.0, self.sums[sources])
        sums = torch.where(past >= 0, before + new, before)
        logits = torch.cat([sums, chunk[2:].float()])[:, None].expand(-1, 5)
        top_logits, top_ids = logits.topk(2)
        return logits, top_ids.int(), top_logits, torch.zeros(len(logits)), sums


class _Sources(torch.nn.Module):
    """What a source is read to: the sum of its tokens, for each of them."""

    def forward(self, token_ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        is_source = torch.arange(_BUCKET.tokens) < count
        total = torch.where(is_source, token_ids[0], 0).sum().float()
        return torch.where(is_source, total, 0.0)[None, None, :, None]


class _SumsWithSources(torch.nn.Module):
    """The scores after a token are the sums of all tokens in its slot, and of those of its source."""

    def __init__(self) -> None:
        super().__init__()
        rows = (_BUCKET.batch, *([1] * _BUCKET.batch))
        states = (torch.zeros(count, 1, _BUCKET.tokens, 1) for count in rows)
        self.states = torch.nn.ParameterList(torch.nn.Parameter(state, requires_grad=False) for state in states)
        self.weights = torch.nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self, token_ids: torch.Tensor, past: torch.Tensor, chunk: torch.Tensor, copied: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        texts, *of_slots = self.states
        sources = torch.cat(of_slots)
        new = token_ids[0, : _BUCKET.batch].float()[:, None, None, None]
        is_new = torch.arange(_BUCKET.tokens)[None, None, :, None] == past[:, None, None, None]
        after = torch.where(is_new, new, texts.index_select(0, copied))
        sums = after.sum((1, 2, 3)) + sources.index_select(0, read[:-1, 0]).amax((1, 2, 3))
        logits = (self.weights * torch.cat([sums, chunk[2:].float()]))[:, None].expand(-1, 5)
        top_logits, top_ids = logits.topk(2)
        return logits, top_ids.int(), top_logits, torch.zeros(len(logits)), after, *of_slots


def _step() -> tuple[torch.Tensor, ...]:
    """Example inputs of a step: tokens, what is past, the chunk, and the copies."""
    slots = _BUCKET.batch
    shapes = (1, slots + _CHUNK_TOKENS), (slots,), (3,)
    return (*(torch.zeros(shape, dtype=torch.int64) for shape in shapes), torch.arange(slots))


@pytest.fixture
def faults(neuron_double: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    module = importlib.import_module("torch_neuronx")
    monkeypatch.setenv("NEURON_DOUBLE_FOLDER", str(tmp_path))
    for restart in (module._runtime.restart_process, neuron_runtime.cache_clear):
        restart()
    yield tmp_path
    module._runtime.restart_process()
    neuron_runtime.cache_clear()


@pytest.fixture
def decoder_request(faults: Path) -> BackendRequest:
    sdk, module = importlib.import_module("torch_neuronx"), _Sums().eval()
    flags = "--target=inf2 --auto-cast=none"
    traced = sdk.trace(module, _step(), input_output_aliases={module.sums: 4}, compiler_args=flags, cpu_backend=True)
    torch.jit.save(traced, faults / f"{_BUCKET}.pt")
    spec, versions = model_spec("text_generation"), {"torch-neuronx": sdk.__version__}
    files, properties = [faults / f"{_BUCKET}.pt"], {"chunk_tokens": str(_CHUNK_TOKENS)}
    return BackendRequest(spec, files, properties, 2, 0, buckets=(_BUCKET,), versions=versions)


@pytest.fixture
def load_with_encoder(decoder_request: BackendRequest, faults: Path) -> Callable[[], DecoderModel]:
    sdk, module = importlib.import_module("torch_neuronx"), _SumsWithSources().eval()
    integers: Any = {"dtype": torch.int64}
    example = (*_step(), torch.zeros(_BUCKET.batch + 1, 2, **integers))
    options: Any = {"compiler_args": "--target=inf2 --auto-cast=none", "cpu_backend": True}
    aliases = {state: 4 + number for number, state in enumerate(module.states)}
    torch.jit.save(sdk.trace(module, example, input_output_aliases=aliases, **options), faults / "steps.pt")
    source = (torch.zeros(1, _BUCKET.tokens, **integers), torch.ones(1, **integers))
    torch.jit.save(sdk.trace(_Sources().eval(), source, **options), faults / "encoder.pt")
    for name, file in (("steps", f"{_BUCKET}.pt"), ("encoder", f"encoder-{_BUCKET}.pt")):
        (faults / f"{name}.pt").rename(faults / file)
    files = [faults / f"{_BUCKET}.pt", faults / f"encoder-{_BUCKET}.pt"]
    return lambda: load_decoder("neuronx", replace(decoder_request, files=files), max_tokens=1, max_bytes=1)


@pytest.fixture
def load(decoder_request: BackendRequest) -> Callable[..., DecoderModel]:
    return lambda **changes: load_decoder("neuronx", replace(decoder_request, **changes), max_tokens=1, max_bytes=1)


def _sums(model: DecoderModel, *runs: DecoderRun) -> list[float]:
    return [float(row[0]) for row in model.compute(runs).logits]


def test_slots_stay_on_the_core_of_their_model(load: Callable[..., DecoderModel]) -> None:
    one, other = load(), load()
    assert (one.blocks, one.block_tokens) == (3, 16)
    assert _sums(one, DecoderRun([4], 0, [2], 1), DecoderRun([5], 0, [0], 1)) == [4, 5]
    assert _sums(other, DecoderRun([6], 0, [2], 1)) == [6]
    assert _sums(one, DecoderRun([1], 1, [2], 1)) == [5]
    one.copy([(2, 1)])
    assert _sums(one, DecoderRun([1], 2, [1], 1), DecoderRun([3], 1, [0], 1)) == [6, 8]


def test_a_step_that_fails_leaves_the_slots_as_they_were(load: Callable[..., DecoderModel]) -> None:
    model = load()
    _sums(model, DecoderRun([4], 0, [2], 1))
    with pytest.raises(RuntimeError, match="core 0 could not compute a step"):
        _sums(model, DecoderRun([4], 1, [2], 1), DecoderRun([100], 0, [1], 1))  # beyond the vocabulary
    assert _sums(model, DecoderRun([2], 1, [2], 1)) == [6]


@pytest.mark.parametrize("status", ["101", "5"])
def test_a_core_that_fails_a_step_of_nothing_too_is_lost_for_all_models(
    load: Callable[..., DecoderModel], faults: Path, status: str
) -> None:
    one, on_another, on_the_same = load(), load(), load()
    (faults / "fault-core-0").write_text(status)
    with pytest.raises(DecoderLost, match=f"core 0 was lost: .*status={status}"):
        _sums(one, DecoderRun([4], 0, [2], 1))
    (faults / "fault-core-0").unlink()
    with pytest.raises(DecoderLost, match="core 0 was lost"):
        _sums(on_the_same, DecoderRun([4], 0, [2], 1))
    assert _sums(on_another, DecoderRun([4], 0, [2], 1)) == [4]
    assert _sums(load(), DecoderRun([4], 0, [2], 1)) == [4], "loaded onto the other core"


def test_a_bundle_that_cannot_run_here_is_refused(load: Callable[..., DecoderModel], faults: Path) -> None:
    for name, empty in (("buckets", ()), ("files", []), ("properties", {})):
        with pytest.raises(SetupError, match="its neuronx artefact lacks its slots; compile it again"):
            load(**{name: empty})
    with pytest.raises(SetupError, match=r"compiled with torch-neuronx 2\.9"):
        load(versions={"torch-neuronx": "2.9"})
    for core in range(2):
        (faults / f"fault-core-{core}").write_text("101")
    with pytest.raises(SetupError, match="none of the 2 cores computes"):
        load()


def test_sources_are_read_into_slots_and_stay(load_with_encoder: Callable[[], DecoderModel], faults: Path) -> None:
    model = load_with_encoder()
    model.read([10, 20], [1])
    model.read([100], [2])
    of_first: dict[str, Any] = {"source_tokens": 2, "source_blocks": [1]}
    of_second: dict[str, Any] = {"source_tokens": 1, "source_blocks": [2]}
    assert _sums(model, DecoderRun([4], 0, [0], 1, **of_first), DecoderRun([5], 0, [2], 1, **of_second)) == [34, 105]
    model.read([1000], [2])
    assert _sums(model, DecoderRun([1], 1, [0], 1, **of_first), DecoderRun([1], 1, [2], 1, **of_second)) == [35, 1006]
    (faults / "fault-core-0").write_text("101")
    with pytest.raises(DecoderLost, match=r"core 0 was lost: .*status=101"):
        model.read([1], [1])
