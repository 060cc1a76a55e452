"""A model that no core has room for, in parts on two simulated cores of the contract double each."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers

from demo.processes import ServiceProcess
from neuronpipe.client import AsyncClient
from neuronpipe.compiler import PipelineOptions
from tests.callers.metrics import series_of
from tests.callers.requests import classify
from tests.models.compiling import compile_model
from tests.models.repository import for_neuron, save
from tests.models.tokenizers import word_piece

pytestmark = [pytest.mark.local_only, pytest.mark.long]

_TEXTS = [f"text number {number} of a few words" for number in range(60)]
_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of four layers."""
    torch.manual_seed(7)
    tokenizer = word_piece(max_tokens=64)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
    )
    folder = tmp_path_factory.mktemp("source")
    save(transformers.BertForSequenceClassification(config), folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def repository(source: Path, neuron_double: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The classifier in two parts."""
    folder = tmp_path_factory.mktemp("models")
    _compile(source, folder, 2)
    return folder


@pytest.fixture
def machine(neuron_double: Mapping[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with four cores that have room for half of the model."""
    return {
        **neuron_double,
        "NEURON_DOUBLE_DEVICES": "2",
        "NEURON_DOUBLE_FOLDER": str(tmp_path / "neuron"),
        "NEURON_DOUBLE_LOG": str(tmp_path / "log"),
        "NEURON_DOUBLE_CORE_BYTES": "800000",
    }


@pytest.fixture(scope="module")
def expected(source: Path) -> list[dict[str, float]]:
    """The scores of transformers."""
    pipe = transformers.pipeline("text-classification", str(source), top_k=None)
    return [{score["label"]: score["score"] for score in scores} for scores in pipe(_TEXTS)]


def _compile(source: Path, folder: Path, parts: int) -> None:
    compile_model(
        source,
        folder,
        "text_classification",
        name="classifier",
        pipeline=PipelineOptions(parts, "memory" if parts > 1 else "time"),
        **for_neuron(folder.parent / "neuronx", "4x32"),
    )


def _serving(repository: Path, machine: Mapping[str, str], *options: str) -> ServiceProcess:
    return ServiceProcess("all", "--repository", str(repository), *options, environment=machine)


async def _scores(client: AsyncClient) -> list[dict[str, float]]:
    responses = await asyncio.gather(*(client.infer(classify(text, top_k=2), timeout_s=60) for text in _TEXTS))
    return [{label.label: label.score for label in reply.result.text_classification.labels} for reply in responses]


async def test_a_model_that_no_core_has_room_for_is_served_in_parts(
    source: Path, repository: Path, machine: dict[str, str], expected: list[dict[str, float]], tmp_path: Path
) -> None:
    _compile(source, tmp_path / "whole", 1)
    with _serving(tmp_path / "whole", machine, "--cores", "2") as whole, pytest.raises(RuntimeError, match="memory is"):
        whole.wait_until_ready()

    with _serving(repository, machine, "--cores", "2", "--metrics-listen", "127.0.0.1:0") as process:
        process.wait_until_ready()
        async with AsyncClient(process.target, retries=False) as client:
            for found, right in zip(await _scores(client), expected, strict=True):
                assert found == pytest.approx(right, abs=_TOLERANCE)
        series = await asyncio.to_thread(series_of, process)
    log = Path(machine["NEURON_DOUBLE_LOG"]).read_text().splitlines()
    executed = [line.split()[2] for line in log if "execute" in line]
    assert executed.count("core=0") == executed.count("core=1") > 0
    labels = 'neuronpipe_model_name="classifier",neuronpipe_model_version="1"'
    assert series[f"neuronpipe_cores{{{labels}}}"] == 2
    first, second = (name for name in series if name.startswith("neuronpipe_part_busy_seconds_total"))
    assert min(series[first], series[second]) > 0
    assert ['neuronpipe_part="0"' in first, 'neuronpipe_part="1"' in second] == [True, True]


async def test_a_core_that_is_lost_takes_its_pipeline_with_it_and_costs_no_request(
    repository: Path, machine: dict[str, str], expected: list[dict[str, float]]
) -> None:
    machine["NEURON_DOUBLE_EXECUTION_MS"] = "5"
    with _serving(repository, machine, "--cores", "4") as process:
        process.wait_until_ready()
        async with AsyncClient(process.target, retries=False) as client:
            scores = asyncio.create_task(_scores(client))
            await asyncio.sleep(0.03)
            (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-3").write_text("101")
            for found, right in zip(await scores, expected, strict=True):
                assert found == pytest.approx(right, abs=_TOLERANCE)
            for found, right in zip(await _scores(client), expected, strict=True):
                assert found == pytest.approx(right, abs=_TOLERANCE)
        process.wait_for("core lost")


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ("1", "compiled in 2 parts, each for a core of its own (--pipeline-cores), and there are 1 cores"),
        ("3", "cores: 3, and the model 'classifier' is in 2 parts, each on a core of its own; give a multiple of 2"),
    ],
)
def test_cores_that_do_not_fit_the_parts_are_refused(
    repository: Path, machine: dict[str, str], cores: str, message: str
) -> None:
    with _serving(repository, machine, "--cores", cores) as process, pytest.raises(RuntimeError) as refused:
        process.wait_until_ready()
    assert message in str(refused.value)
