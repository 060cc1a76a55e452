"""What `neuronpipe check-deployment` finds, each by one fault in a deployment that is otherwise right."""

from pathlib import Path

import pytest

from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bundles.manifest import MANIFEST_FILE, Artifact
from neuronpipe.deploy import checks
from neuronpipe.deploy.checks import Findings, check_deployment
from neuronpipe.serve.settings import PipelineProcessSettings
from neuronpipe.stages.neuron_executor.runtimes import host, neuron
from neuronpipe.stages.settings import NeuronExecutorSettings, TokenizerSettings
from tests.unit.bundles.written import write_bundle

_MIB = 1 << 20


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "models")
    return tmp_path / "models"


@pytest.fixture(autouse=True)
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two CPUs and without devices, until a test makes some."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for module in (checks, neuron):
        monkeypatch.setattr(module, "DEVICE_FOLDER", folder)
    monkeypatch.setattr(host, "available_cpus", lambda: 2)
    return folder


def _problem(found: Findings) -> str:
    [problem] = found.problems
    return problem


def test_a_right_deployment_has_no_problems(repository: Path) -> None:
    found = check_deployment(NeuronExecutorSettings.of(repository=repository), ["m", "m/1"], lambda: 256 * _MIB)
    assert (found.problems, found.models) == ([], [("m", 1)])
    assert check_deployment(PipelineProcessSettings.of(repository=repository)).problems == []
    assert (
        check_deployment(WorkerSettings.of(jobs_redis_url="redis://redis:6379/0", target="gateway:50050")).problems
        == []
    )


@pytest.mark.parametrize("wanted", ["other", "m/2"])
def test_a_model_that_is_not_there_is_named_with_those_that_are(repository: Path, wanted: str) -> None:
    found = check_deployment(TokenizerSettings.of(repository=repository), [wanted])
    assert _problem(found) == f"model {wanted}: is not served from {repository}; served are: m/1"


def test_a_default_model_is_one_that_is_served(repository: Path) -> None:
    found = check_deployment(PipelineProcessSettings.of(repository=repository, default_models="m, other"))
    assert _problem(found).startswith("model other: is not served")


def test_a_repository_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    found = check_deployment(NeuronExecutorSettings.of(repository=tmp_path / "none"))
    assert "none: no such folder" in _problem(found)


def test_a_bundle_that_cannot_be_read_is_named(repository: Path) -> None:
    (write_bundle(repository, "half") / MANIFEST_FILE).unlink()
    assert "half/1: is not a bundle: it has no manifest.json" in _problem(
        check_deployment(TokenizerSettings.of(repository=repository))
    )


def test_all_problems_are_found_at_once(repository: Path) -> None:
    settings = NeuronExecutorSettings.of(repository=repository, cores=3)
    found = check_deployment(settings, ["other"], lambda: 64 * _MIB)
    assert [problem.partition(":")[0] for problem in found.problems] == ["model other", "cores", "memory"]


def test_a_model_that_was_not_compiled_for_the_back_end_is_named(repository: Path) -> None:
    found = check_deployment(NeuronExecutorSettings.of(repository=repository, backend="torch"))
    assert "no artefact for the back end 'torch', only for: openvino, fake" in _problem(found)


@pytest.mark.parametrize(("device", "backend"), [("neuron0", "neuronx"), ("nvidia0", "torch")])
def test_devices_of_a_second_back_end_are_refused(repository: Path, devices: Path, device: str, backend: str) -> None:
    (devices / device).touch()
    found = check_deployment(NeuronExecutorSettings.of(repository=repository))
    assert _problem(found).startswith(
        f"two back ends: the container has {devices}/{device}, a device of the back end {backend}, and its models run "
        "on openvino;"
    )


def test_what_looks_like_a_device_is_none(repository: Path, devices: Path) -> None:
    (devices / "nvidiactl").touch()
    (devices / "neuron").mkdir()
    assert check_deployment(NeuronExecutorSettings.of(repository=repository)).problems == []


@pytest.mark.parametrize(
    ("count", "cores", "expected"),
    [
        (1, 4, "cores: 4, but the container has 2 NeuronCores"),
        (0, 0, "no Neuron device on this machine"),
        (2, "0-4", "cores: 5, but the container has 4 NeuronCores"),
    ],
)
def test_cores_are_those_of_the_container(
    tmp_path: Path, devices: Path, monkeypatch: pytest.MonkeyPatch, count: int, cores: int | str, expected: str
) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", {})  # the SDK is on no machine of tests
    for number in range(count):
        (devices / f"neuron{number}").touch()
    write_bundle(tmp_path / "models", artifacts=(Artifact(backend="neuronx", dtype="bfloat16"),))
    found = check_deployment(NeuronExecutorSettings.of(repository=tmp_path / "models", backend="neuronx", cores=cores))
    assert _problem(found).startswith(expected)


def test_a_model_has_a_core_for_each_of_its_parts(tmp_path: Path) -> None:
    write_bundle(tmp_path / "models", artifacts=(Artifact(backend="fake", dtype="float32", pipeline_cores=4),))
    found = check_deployment(NeuronExecutorSettings.of(repository=tmp_path / "models", cores=2))
    assert "compiled in 4 parts, each for a core of its own (--pipeline-cores), and there are 2 cores" in _problem(
        found
    )


def test_a_back_end_that_the_image_does_not_have_is_named(
    tmp_path: Path, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_PACKAGES", {"neuronx": "no_such_package"})
    (devices / "neuron0").touch()
    write_bundle(tmp_path / "models", artifacts=(Artifact(backend="neuronx", dtype="bfloat16"),))
    found = check_deployment(NeuronExecutorSettings.of(repository=tmp_path / "models"))
    assert _problem(found).startswith("back end neuronx: no_such_package is not in this image")


@pytest.fixture
def large_models(repository: Path) -> Path:
    """The repository with two further models, of 200 and 300 MiB."""
    for name in ("large", "larger"):
        weights = write_bundle(repository, name) / "artifacts/openvino/model.bin"
        weights.unlink()  # it is shared by the bundles
        with weights.open("wb") as file:
            file.truncate((300 if name == "larger" else 200) * _MIB)
    return repository


def test_a_memory_limit_below_the_weights_is_refused_with_both_numbers(large_models: Path) -> None:
    settings = NeuronExecutorSettings.of(repository=large_models)
    # 128 MiB for the process, 501 for 200, 300, and three models' small files.
    assert _problem(check_deployment(settings, limit_bytes=lambda: 628 * _MIB)) == (
        "memory: the container's limit is 628 MiB, and an executor of these models takes at least 629 MiB, 501 for "
        "weights (larger/1 has the most: 301); raise the limit, or serve fewer models"
    )
    assert check_deployment(settings, limit_bytes=lambda: 629 * _MIB).problems == []


def test_of_models_that_make_room_for_each_other_the_largest_must_fit(large_models: Path) -> None:
    settings = NeuronExecutorSettings.of(
        repository=large_models, models_on_demand=True, max_model_memory_bytes=302 * _MIB
    )
    # 128 MiB for the process, 301 for the larger model.
    assert check_deployment(settings, limit_bytes=lambda: 430 * _MIB).problems == []
    assert "at least 429 MiB, 301 for weights" in _problem(check_deployment(settings, limit_bytes=lambda: 428 * _MIB))


@pytest.mark.parametrize(
    ("text", "expected"), [("4294967296\n", 1 << 32), ("max\n", None), ("9223372036854771712\n", None), (None, None)]
)
def test_the_memory_limit_is_that_of_the_control_group(tmp_path: Path, text: str | None, expected: int | None) -> None:
    from neuronpipe.stages.neuron_executor.runtimes.host import memory_limit

    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert memory_limit(tmp_path) == expected
