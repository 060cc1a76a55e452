"""Models compiled for Neuron, served by four processes on two simulated cores of the contract double."""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import InvalidInput, Unavailable
from neuronpipe.stages.neuron_executor.runtimes.neuron import DOUBLES_VARIABLE
from tests.callers.metrics import series_of
from tests.callers.requests import answer, classify, embed
from tests.models.compiling import compile_model
from tests.models.decoders import save_decoder
from tests.models.repository import NEURONX_MODELS, for_neuron, link_models, make_repository
from tests.models.versions import changing_manifest
from tests.suite.waiting import until
from tests.systems.pipelines import local_system
from tests.unit.stages.neuron_executor.fake_monitor import write_monitor

pytestmark = [pytest.mark.local_only, pytest.mark.long]

_CONTEXT = (
    "The ferry leaves Stockholm at half past nine. It gets to Helsinki the next morning, after a night on the "
    "Baltic Sea. "
)
_REQUESTS = [
    classify("A fine day."),
    embed("The cat sat on the mat.", model="embedder"),
    answer("When does the ferry leave?", _CONTEXT),
    embed("word " * 50, model="embedder"),
]
# Of float32, computed in other shapes.
_TOLERANCE = 1e-4


@pytest.fixture
def machine(neuron_double: Mapping[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with one device, and a log of what it does."""
    return {
        **neuron_double,
        "NEURON_DOUBLE_FOLDER": str(tmp_path / "neuron"),
        "NEURON_DOUBLE_LOG": str(tmp_path / "log"),
    }


@pytest.fixture
def three_models(neuronx_repository: Path, tmp_path: Path) -> Path:
    """Those that the requests are for."""
    return link_models(tmp_path / "three", neuronx_repository, "classifier", "embedder", "answerer")


@pytest.fixture
def reference_repository(repository: Path, tmp_path: Path) -> Path:
    """The same models for OpenVINO."""
    folder = link_models(tmp_path / "reference", repository, "classifier", "answerer")
    return make_repository(folder, {"embedder": NEURONX_MODELS["embedder"][1](tmp_path / "embedder")})


@pytest.fixture
def processes(three_models: Path, machine: dict[str, str]) -> Iterator[dict[str, ServiceProcess]]:
    machine["NEURON_DOUBLE_EXECUTION_MS"] = "5"
    with four_processes(
        three_models, stage_options={"neuron-executor": ("--cores", "0-1", "--in-flight", "2")}, environment=machine
    ) as processes:
        yield processes


def _log(machine: Mapping[str, str]) -> list[str]:
    return [line.split(" ", 1)[1] for line in Path(machine["NEURON_DOUBLE_LOG"]).read_text().splitlines()]


async def test_every_task_gives_the_same_results_as_with_openvino_and_nothing_is_compiled(
    processes: dict[str, ServiceProcess], machine: Mapping[str, str], reference_repository: Path
) -> None:
    # Every bucket of the three models ran on both cores before readiness.
    warmed_up = Counter(line for line in _log(machine) if line.startswith("execute"))
    assert set(warmed_up) == {
        f"execute core={core} shape={shape}" for core in (0, 1) for shape in ("1x16", "4x64", "16x64")
    }
    async with AsyncClient(processes["gateway"].target) as client, local_system(reference_repository) as reference:
        for request in _REQUESTS:
            result, expected = (await client.infer(request)).result, (await reference.infer(request)).result
            if result.WhichOneof("task") == "sentence_embedding":
                assert list(result.sentence_embedding.embedding) == pytest.approx(
                    expected.sentence_embedding.embedding, abs=_TOLERANCE
                )
            elif result.WhichOneof("task") == "text_classification":
                scores = [
                    {label.label: label.score for label in answer.text_classification.labels}
                    for answer in (result, expected)
                ]
                assert scores[0] == pytest.approx(scores[1], abs=_TOLERANCE)
            else:
                (found,), (right,) = result.question_answering.answers, expected.question_answering.answers
                assert (found.text, found.start, found.end) == (right.text, right.start, right.end)
                assert found.score == pytest.approx(right.score, abs=_TOLERANCE)
        windows = await client.infer(answer("When does the ferry leave?", _CONTEXT * 6))
        assert windows.result.question_answering.answers
        assert windows.usage.bucket_tokens == 64
    assert not [line for line in _log(machine) if line.startswith("compile")]


async def test_a_text_longer_than_the_largest_bucket_is_refused_by_its_name(
    processes: dict[str, ServiceProcess],
) -> None:
    async with AsyncClient(processes["gateway"].target, retries=False) as client:
        with pytest.raises(InvalidInput, match=r"102 tokens, the model takes 64 \(its largest bucket is 4x64\)"):
            await client.infer(classify("word " * 100))


async def test_a_core_that_dies_under_load_costs_no_request(
    processes: dict[str, ServiceProcess], machine: Mapping[str, str]
) -> None:
    async def call(number: int) -> bool:
        text = "word " * (1 + number % 50)
        requests = (classify(text), embed(text, model="embedder"))
        response = await client.infer(requests[number % 2], timeout_s=60)
        return response.result.WhichOneof("task") is not None

    async with AsyncClient(processes["gateway"].target, retries=False) as client:
        callers = [asyncio.create_task(call(number)) for number in range(400)]
        await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
        (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-1").write_text("101")
        assert all(await asyncio.gather(*callers))
    processes["neuron-executor"].wait_for("core lost")


async def _lose_the_core_under_load(
    client: AsyncClient, machine: Mapping[str, str]
) -> list[asyncio.Task[InferResponse]]:
    """Sends requests of two models, and makes the core fail for good once one of them is answered."""
    texts = [f"{number}" for number in range(60)]
    requests = [request for text in texts for request in (classify(text), embed(text, model="embedder"))]
    callers = [asyncio.create_task(client.infer(request, timeout_s=60)) for request in requests]
    await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
    (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-0").write_text("101")
    return callers


@pytest.mark.parametrize("fronts", [0, 2])
async def test_a_service_without_a_core_answers_all_as_unavailable_and_ends(
    three_models: Path, machine: dict[str, str], fronts: int
) -> None:
    machine["NEURON_DOUBLE_EXECUTION_MS"] = "50"
    options = ("--repository", str(three_models), "--cores", "1", "--in-flight", "2", "--front-processes", str(fronts))
    with ServiceProcess("all", *options, environment=machine) as process:
        process.wait_until_ready()
        async with AsyncClient(process.target, retries=False) as client:
            callers = await _lose_the_core_under_load(client, machine)
            outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 30)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert failed
        assert {type(outcome) for outcome in failed} == {Unavailable}
        assert process.wait() == 1


async def test_neuron_monitor_is_read_beside_the_models(
    one_model: Path, machine: dict[str, str], tmp_path: Path
) -> None:
    write_monitor(tmp_path)
    machine["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    options = ("--repository", str(one_model), "--cores", "2", "--metrics-listen", "127.0.0.1:0")
    with ServiceProcess("neuron-executor", *options, environment=machine) as process:
        process.wait_until_ready()
        utilization = 'neuronpipe_neuron_core_utilization{neuronpipe_core="1"}'
        await asyncio.to_thread(until, lambda: utilization in series_of(process))
        series = await asyncio.to_thread(series_of, process)
        assert series[utilization] == 0.975
        assert series['neuronpipe_neuron_errors_total{neuronpipe_neuron_error="hardware"}'] == 1
        assert series['neuronpipe_cores{neuronpipe_model_name="classifier",neuronpipe_model_version="1"}'] == 2


@pytest.mark.parametrize("in_flight", ["1", "2"])
async def test_an_executor_without_a_core_ends_and_another_takes_its_work(
    three_models: Path, machine: dict[str, str], tmp_path: Path, in_flight: str
) -> None:
    machine["NEURON_DOUBLE_EXECUTION_MS"] = "20"
    # Three models share the core.
    options = ("--repository", str(three_models))
    executor = ("--cores", "1", "--in-flight", in_flight)
    elsewhere = {**machine, "NEURON_DOUBLE_FOLDER": str(tmp_path / "other")}
    with (
        four_processes(three_models, stage_options={"neuron-executor": executor}, environment=machine) as processes,
        ServiceProcess("neuron-executor", *options, *executor, environment=elsewhere) as second,
    ):
        second.wait_until_ready()
        targets = [
            f"--tokenizer-target={processes['tokenizer'].target}",
            f"--executor-target={processes['neuron-executor'].target},{second.target}",
            f"--postprocessor-target={processes['postprocessor'].target}",
        ]
        with ServiceProcess("gateway", *options, *targets) as gateway:
            gateway.wait_until_ready()
            async with AsyncClient(gateway.target, retries=False) as client:
                callers = await _lose_the_core_under_load(client, machine)
                assert all(response.result.WhichOneof("task") for response in await asyncio.gather(*callers))
        assert processes["neuron-executor"].wait() == 1


def _refusal(repository: Path, environment: Mapping[str, str], *options: str) -> str:
    with ServiceProcess(
        "neuron-executor", "--repository", str(repository), *options, environment=environment
    ) as process:
        with pytest.raises(RuntimeError) as refused:
            process.wait_until_ready()
        assert process.wait() == 2
    return str(refused.value)


@pytest.fixture
def one_model(neuronx_repository: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    shutil.copytree(neuronx_repository / "classifier", folder / "classifier")
    return folder


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        (
            {"NEURON_DOUBLE_SDK": "2.29"},
            ("--cores", "2"),
            r"compiled with torch-neuronx 2.9.0.2.15.32035+double (SDK 2.31), here is 2.9.0.2.13",
        ),
        ({"NEURON_DOUBLE_DEVICES": "0"}, ("--cores", "2"), "this machine shows no Neuron device"),
        ({}, (), "no Neuron device on this machine"),
        ({}, ("--cores", "0-3"), "its cores belong to another process"),
        ({"NEURON_DOUBLE_CORE_BYTES": "1000"}, ("--cores", "1"), "the core's memory is full"),
        ({DOUBLES_VARIABLE: ""}, ("--cores", "2"), "is the contract double of the tests, which is no Neuron device"),
        (
            {"NEURON_RT_VISIBLE_CORES": "1"},
            ("--cores", "2"),
            "cores 2: contradicts NEURON_RT_VISIBLE_CORES=1 in the environment",
        ),
        ({}, ("--cores", "zero"), "cores 'zero': must be a number of cores, or a list such as 0-3 or 0,2"),
    ],
    ids=["version", "no device", "no device found", "not ours", "memory", "double", "environment", "cores"],
)
def test_what_cannot_be_loaded_is_refused_with_what_to_do(
    one_model: Path, machine: dict[str, str], environment: Mapping[str, str], options: tuple[str, ...], message: str
) -> None:
    assert message in _refusal(one_model, {**machine, **environment}, *options)


def test_a_bundle_of_the_double_is_refused_by_the_sdk(one_model: Path, machine: dict[str, str], tmp_path: Path) -> None:
    # A stand-in for the SDK, which cannot be installed here: all that matters is that its version is not the double's.
    (tmp_path / "sdk").mkdir()
    (tmp_path / "sdk" / "torch_neuronx.py").write_text('__version__ = "2.9.0.2.15.32035"\n')
    _, *others = machine["PYTHONPATH"].split(os.pathsep)  # all but the double
    path = os.pathsep.join([str(tmp_path / "sdk"), *others])
    message = _refusal(one_model, machine | {"PYTHONPATH": path}, "--cores", "2")
    assert "made with the contract double of the tests" in message


def test_a_bundle_whose_inputs_are_in_another_order_is_refused(one_model: Path, machine: dict[str, str]) -> None:
    with changing_manifest(one_model / "classifier" / "1") as content:
        content["model"]["inputs"] = ["input_ids", "token_type_ids", "attention_mask"]
    assert "was compiled for other inputs than the model's" in _refusal(one_model, machine, "--cores", "2")


@pytest.fixture
def writer(neuron_double: Mapping[str, str], tmp_path: Path) -> Path:
    """A decoder for three slots of 96 tokens."""
    compile_model(
        save_decoder("llama", tmp_path / "writer"),
        tmp_path / "written",
        name="writer",
        dtype="",
        **for_neuron(tmp_path, "3x96"),
    )
    return tmp_path / "written"


async def test_texts_share_the_slots_of_a_core_and_a_dead_one_is_left_out(
    writer: Path, machine: dict[str, str]
) -> None:
    Path(machine["NEURON_DOUBLE_FOLDER"]).mkdir()
    (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-0").write_text("101")
    options = ("--repository", str(writer), "--cores", "0-1")
    with ServiceProcess("all", *options, environment=machine) as process:
        process.wait_until_ready()
        async with AsyncClient(process.target, retries=False, timeout_s=60) as client:
            prompts = [f"A module number {number} is a file" for number in range(5)]
            alone = [await client.generate_text("writer", prompt, max_new_tokens=20) for prompt in prompts]
            texts = [client.generate_text("writer", prompt, max_new_tokens=20) for prompt in prompts]
            assert await asyncio.gather(*texts) == alone
            with pytest.raises(InvalidInput, match="96"):
                await client.generate_text("writer", "word " * 200, max_new_tokens=20)
        process.wait_for("core is dead at the start")
    assert "compile" not in "".join(_log(machine))


async def test_a_core_that_is_lost_ends_the_text_and_the_process(writer: Path, machine: dict[str, str]) -> None:
    machine["NEURON_DOUBLE_EXECUTION_MS"] = "20"
    with ServiceProcess("all", "--repository", str(writer), "--cores", "1", environment=machine) as process:
        process.wait_until_ready()
        async with AsyncClient(process.target, retries=False) as client:
            chunks: list[str] = []

            async def read() -> None:
                async for event in client.generate("writer", "A module", max_new_tokens=60):
                    chunks.append(event.chunk.text)
                    if len(chunks) == 1:
                        (Path(machine["NEURON_DOUBLE_FOLDER"]) / "fault-core-0").write_text("101")

            with pytest.raises(Unavailable):
                await read()
            assert chunks
        assert process.wait() == 1
