"""backends/neuronx_decoder.py on the contract double: slots on a core, steps that fail, and cores that do."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends import load_decoder
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel, Run
from tests.unit.model_specs import model_spec

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
        self,
        token_ids: torch.Tensor,
        past: torch.Tensor,
        chunk: torch.Tensor,
        copied: torch.Tensor,
        read: torch.Tensor,
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
def request_(faults: Path) -> BackendRequest:
    sdk, module = importlib.import_module("torch_neuronx"), _Sums().eval()
    slots = _BUCKET.batch
    example = (
        torch.zeros(1, slots + _CHUNK_TOKENS, dtype=torch.int64),
        torch.zeros(slots, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.arange(slots),
    )
    flags = "--target=inf2 --auto-cast=none"
    traced = sdk.trace(module, example, input_output_aliases={module.sums: 4}, compiler_args=flags, cpu_backend=True)
    torch.jit.save(traced, faults / f"{_BUCKET}.pt")
    spec, versions = model_spec("text_generation"), {"torch-neuronx": sdk.__version__}
    files, properties = [faults / f"{_BUCKET}.pt"], {"chunk_tokens": str(_CHUNK_TOKENS)}
    return BackendRequest(spec, files, properties, 2, 0, buckets=(_BUCKET,), versions=versions)


@pytest.fixture
def load_with_encoder(request_: BackendRequest, faults: Path) -> Callable[[], DecoderModel]:
    sdk, module, slots = importlib.import_module("torch_neuronx"), _SumsWithSources().eval(), _BUCKET.batch
    integers: Any = {"dtype": torch.int64}
    example = (
        torch.zeros(1, slots + _CHUNK_TOKENS, **integers),
        torch.zeros(slots, **integers),
        torch.zeros(3, **integers),
        torch.arange(slots),
        torch.zeros(slots + 1, 2, **integers),
    )
    options: Any = {"compiler_args": "--target=inf2 --auto-cast=none", "cpu_backend": True}
    aliases = {state: 4 + number for number, state in enumerate(module.states)}
    torch.jit.save(sdk.trace(module, example, input_output_aliases=aliases, **options), faults / "steps.pt")
    source = (torch.zeros(1, _BUCKET.tokens, **integers), torch.ones(1, **integers))
    torch.jit.save(sdk.trace(_Sources().eval(), source, **options), faults / "encoder.pt")
    for name, file in (("steps", f"{_BUCKET}.pt"), ("encoder", f"encoder-{_BUCKET}.pt")):
        (faults / f"{name}.pt").rename(faults / file)
    files = [faults / f"{_BUCKET}.pt", faults / f"encoder-{_BUCKET}.pt"]
    return lambda: load_decoder("neuronx", replace(request_, files=files), max_tokens=1, max_bytes=1)


@pytest.fixture
def load(request_: BackendRequest) -> Callable[..., DecoderModel]:
    return lambda **changes: load_decoder("neuronx", replace(request_, **changes), max_tokens=1, max_bytes=1)


def _sums(model: DecoderModel, *runs: Run) -> list[float]:
    return [float(row[0]) for row in model.compute(runs).logits]


def test_slots_stay_on_the_core_of_their_model(load: Callable[..., DecoderModel]) -> None:
    one, other = load(), load()
    assert (one.blocks, one.block_tokens) == (3, 16)
    assert _sums(one, Run([4], 0, [2], True), Run([5], 0, [0], True)) == [4, 5]
    assert _sums(other, Run([6], 0, [2], True)) == [6]
    assert _sums(one, Run([1], 1, [2], True)) == [5]
    one.copy([(2, 1)])
    assert _sums(one, Run([1], 2, [1], True), Run([3], 1, [0], True)) == [6, 8]


def test_a_step_that_fails_leaves_the_slots_as_they_were(load: Callable[..., DecoderModel]) -> None:
    model = load()
    _sums(model, Run([4], 0, [2], True))
    with pytest.raises(RuntimeError, match="core 0 could not compute a step"):
        _sums(model, Run([4], 1, [2], True), Run([100], 0, [1], True))  # beyond the vocabulary
    assert _sums(model, Run([2], 1, [2], True)) == [6]


@pytest.mark.parametrize("status", ["101", "5"])
def test_a_core_that_fails_a_step_of_nothing_too_is_lost_for_all_models(
    load: Callable[..., DecoderModel], faults: Path, status: str
) -> None:
    one, on_another, on_the_same = load(), load(), load()
    (faults / "fault-core-0").write_text(status)
    with pytest.raises(DecoderLost, match=f"core 0 was lost: .*status={status}"):
        _sums(one, Run([4], 0, [2], True))
    (faults / "fault-core-0").unlink()
    with pytest.raises(DecoderLost, match="core 0 was lost"):
        _sums(on_the_same, Run([4], 0, [2], True))
    assert _sums(on_another, Run([4], 0, [2], True)) == [4]
    assert _sums(load(), Run([4], 0, [2], True)) == [4], "loaded onto the other core"


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


def test_sources_are_read_into_slots_and_stay_there(
    load_with_encoder: Callable[[], DecoderModel], faults: Path
) -> None:
    model = load_with_encoder()
    model.read([10, 20], [1])
    model.read([100], [2])
    of_first: dict[str, Any] = {"source_tokens": 2, "source_blocks": [1]}
    of_second: dict[str, Any] = {"source_tokens": 1, "source_blocks": [2]}
    assert _sums(model, Run([4], 0, [0], True, **of_first), Run([5], 0, [2], True, **of_second)) == [34, 105]
    model.read([1000], [2])
    assert _sums(model, Run([1], 1, [0], True, **of_first), Run([1], 1, [2], True, **of_second)) == [35, 1006]
    (faults / "fault-core-0").write_text("101")
    with pytest.raises(DecoderLost, match=r"core 0 was lost: .*status=101"):
        model.read([1], [1])
