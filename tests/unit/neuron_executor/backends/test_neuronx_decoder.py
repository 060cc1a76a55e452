"""backends/neuronx_decoder.py on the contract double: slots on a core, steps that fail, and cores that do."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.neuron_executor.backends import load_decoder
from neuronpipe.neuron_executor.backends.base import BackendRequest
from neuronpipe.neuron_executor.backends.neuron_runtime import neuron_runtime
from neuronpipe.runtimes.decoder import DecoderLost, DecoderModel, Run
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
        return logits, top_ids.int(), top_logits, sums


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
    traced = sdk.trace(module, example, input_output_aliases={module.sums: 3}, compiler_args=flags, cpu_backend=True)
    torch.jit.save(traced, faults / f"{_BUCKET}.pt")
    spec, versions = model_spec("text_generation"), {"torch-neuronx": sdk.__version__}
    files, properties = [faults / f"{_BUCKET}.pt"], {"chunk_tokens": str(_CHUNK_TOKENS)}
    return BackendRequest(spec, files, properties, 2, 0, buckets=(_BUCKET,), versions=versions)


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
