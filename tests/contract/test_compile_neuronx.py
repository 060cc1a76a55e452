"""Compiling for Neuron, on the contract double of its SDK: what is passed, stamped and kept, and how it goes wrong."""

import fcntl
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers

from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import BucketRequest, NeuronxOptions
from neuronpipe.compiler.modules import Positional
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes import neuron
from tests.models.compiling import compile_model
from tests.suite.waiting import until

pytestmark = pytest.mark.sampled if transformers.__version__.startswith("4.") else pytest.mark.long

_FLAGS = ["--target=inf2", "--model-type=transformer", "--optlevel=2", "--enable-mixed-precision-accumulation"]


@pytest.fixture
def log(neuron_double: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The shapes that were compiled, in order."""
    path = tmp_path / "log"
    monkeypatch.setenv("NEURON_DOUBLE_LOG", str(path))
    monkeypatch.setenv("NEURON_DOUBLE_DEVICES", "0")
    monkeypatch.setenv("NEURON_DOUBLE_FOLDER", str(tmp_path / "neuron"))
    return lambda: (
        [line.split("shape=")[1] for line in path.read_text().splitlines() if " compile " in line]
        if path.exists()
        else []
    )


@pytest.fixture
def compiled(log: object, sources: dict[str, Path], tmp_path: Path) -> Callable[..., Bundle]:
    def run(*buckets: str, dtype: str = "float32", max_divergence: float | None = None, **options: object) -> Bundle:
        return compile_model(
            sources["classifier"],
            tmp_path / "repository",
            "text_classification",
            name="model",
            backend="neuronx",
            dtype=dtype,
            max_divergence=max_divergence,
            buckets=BucketRequest(buckets),
            neuronx=NeuronxOptions(cache=tmp_path / "cache", **options),  # type: ignore[arg-type]
        )

    return run


def _fail(tmp_path: Path, bucket: str, failure: str) -> Path:
    path = tmp_path / "neuron" / f"fault-compile-{bucket}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(failure)
    return path


def test_every_bucket_is_compiled_once_and_stamped_with_all_that_it_depends_on(
    compiled: Callable[..., Bundle], log: Callable[[], list[str]]
) -> None:
    bundle = compiled("4x32", "1x8")
    artifact = bundle.manifest.artifacts[0]
    assert sorted(log()) == ["1x8", "4x32"]
    assert [str(bucket) for bucket in artifact.buckets] == ["1x8", "4x32"]
    assert artifact.versions["torch-neuronx"].endswith("+double")
    assert set(artifact.versions) == {"sdk", "torch-neuronx", "neuronx-cc", "torch", "transformers"}
    stamp = json.loads((bundle.folder / "artifacts/neuronx/4x32.json").read_text())
    assert stamp["inputs"] == [
        {"name": name, "shape": [4, 32], "dtype": "int64"} for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert stamp["flags"] == [*_FLAGS, "--auto-cast=none"]
    assert stamp["weights_sha256"] == bundle.manifest.source.weights_sha256
    assert stamp["versions"].items() >= artifact.versions.items()


def test_what_was_compiled_is_not_compiled_again_unless_something_that_it_depends_on_changed(
    compiled: Callable[..., Bundle], log: Callable[[], list[str]]
) -> None:
    compiled("1x8")
    compiled("1x8")
    assert log() == ["1x8"]
    compiled("1x8", optlevel=1)
    assert log() == ["1x8", "1x8"]


def test_a_compilation_that_was_interrupted_goes_on_where_it_ended(
    compiled: Callable[..., Bundle], log: Callable[[], list[str]], tmp_path: Path
) -> None:
    fault = _fail(tmp_path, "4x32", "kill")
    with pytest.raises(
        SetupError, match=r"^bucket 4x32: the Neuron compiler was killed, as it is where memory runs out"
    ):
        compiled("1x8", "4x32")
    assert not list((tmp_path / "repository").glob("model/*"))
    fault.unlink()
    compiled("1x8", "4x32")
    assert log() == ["1x8", "4x32", "4x32"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("-9", "was killed, as it is where memory runs out"),
        ("unsupported", "failed: .*aten::nonzero is not supported"),
        ("-11", "-11"),
    ],
)
def test_a_bucket_that_cannot_be_compiled_is_named_with_the_reason(
    failure: str, message: str, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    _fail(tmp_path, "4x32", failure)
    with pytest.raises(SetupError, match=f"^bucket 4x32: the Neuron compiler .*{message}"):
        compiled("4x32")


def _hung(log_path: Path) -> int:
    """The process id of a compiler that hangs."""

    def hanging() -> list[str]:
        return re.findall(r" hang .*pid=(\d+)\n", log_path.read_text()) if log_path.exists() else []

    until(lambda: bool(hanging()), "no compiler hangs")
    return int(hanging()[0])


def _wait_until_gone(pid: int) -> None:
    def is_gone() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"  # its parent has not asked for its end yet

    until(is_gone, f"the end of process {pid}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str)
def test_a_compiler_that_hangs_ends_with_the_command(
    number: signal.Signals, code: int, log: object, sources: dict[str, Path], tmp_path: Path
) -> None:
    _fail(tmp_path, "1x8", "hang")
    options = ("--backend", "neuronx", "--bucket", "1x8", "--compile-cache", str(tmp_path / "cache"))
    command = f"{sys.executable} -m neuronpipe compile {sources['classifier']} --task text-classification".split()
    with subprocess.Popen(
        [*command, *options, "--repository", str(tmp_path / "repository")], stderr=subprocess.DEVNULL
    ) as process:
        compiler = _hung(tmp_path / "log")
        process.send_signal(number)
        assert process.wait(60) == code
    _wait_until_gone(compiler)


def test_a_compiler_that_hangs_does_not_hold_up_the_failure_of_another(
    compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    _fail(tmp_path, "1x8", "hang")
    _fail(tmp_path, "4x32", "-11")
    with pytest.raises(SetupError, match=r"^bucket 4x32: .*-11"):
        compiled("1x8", "4x32", workers=2)


@pytest.fixture
def device(log: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine with a device of two cores; the folder where processes agree on who owns one."""
    monkeypatch.setattr(neuron, "DEVICE_FOLDER", tmp_path)
    (tmp_path / "neuron0").touch()
    monkeypatch.setenv("NEURON_DOUBLE_DEVICES", "1")
    folder = tmp_path / "neuron"
    folder.mkdir()
    return folder


def test_on_a_device_the_traces_themselves_are_compared_and_none_is_compiled_there(
    device: Path, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    accuracy = compiled("1x8", "4x32", max_divergence=5e-5).manifest.artifacts[0].accuracy
    assert accuracy is not None
    assert accuracy.emulator == ""
    lines = [line.split(" ") for line in (tmp_path / "log").read_text().splitlines()]
    by_event = {event: {pid for pid, kind, *_ in lines if kind == event} for event in ("compile", "load", "execute")}
    # What compiles takes no core, and the process that runs owns one only as long as it lives.
    assert len(by_event["compile"]) == 1
    assert by_event["load"] == by_event["execute"] != by_event["compile"]
    assert {line[2] for line in lines if line[1] == "load"} == {"cores=0"}


def test_on_a_device_that_another_process_owns_nothing_that_was_compiled_is_lost(
    device: Path, compiled: Callable[..., Bundle], log: Callable[[], list[str]]
) -> None:
    with ExitStack() as stack:
        for core in (0, 1):
            lock = stack.enter_context((device / f"core-{core}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(
            SetupError, match=r"cannot be run on this machine's Neuron device: .*not available.*was compiled is kept"
        ):
            compiled("1x8")
    compiled("1x8")
    assert log() == ["1x8"]


def test_bfloat16_is_a_cast_that_is_always_spelled_out(compiled: Callable[..., Bundle]) -> None:
    artifact = compiled("1x8", dtype="bfloat16").manifest.artifacts[0]
    assert artifact.properties["compiler_args"].split() == [*_FLAGS, "--auto-cast=matmult", "--auto-cast-type=bf16"]
    assert artifact.accuracy is not None
    # Rounded to 8 bits, so not equal; and emulated, so not claimed for the device.
    assert 1e-4 < artifact.accuracy.largest_difference < 1
    assert artifact.accuracy.emulator == "PyTorch, as no Neuron device was at hand"


@pytest.mark.parametrize(("dtype", "cast"), [("float32", "matmult"), ("bfloat16", "none")])
def test_a_cast_that_contradicts_the_dtype_is_refused(dtype: str, cast: str, compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(SetupError, match=f"--auto-cast {cast}: --dtype {dtype} casts"):
        compiled("1x8", dtype=dtype, auto_cast=cast)


def test_an_artefact_that_is_too_far_off_makes_no_bundle(compiled: Callable[..., Bundle], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"differs from PyTorch float32 by .* the limit is 1.00e-06"):
        compiled("1x8", dtype="bfloat16", max_divergence=1e-6)
    assert not list((tmp_path / "repository").glob("model/*"))


def test_less_than_one_worker_is_refused(compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(SetupError, match="--compile-workers 0: must be 1 or more"):
        compiled("1x8", workers=0)


def test_neuronx_without_buckets_is_refused_with_what_to_name(compiled: Callable[..., Bundle]) -> None:
    with pytest.raises(
        SetupError, match="neuronx computes only the shapes that it was compiled for; name them with --bucket"
    ):
        compiled()


def test_inputs_reach_the_model_by_name_whatever_its_own_order_is() -> None:
    class TypesFirst(torch.nn.Module):
        def forward(self, input_ids: int, token_type_ids: int, attention_mask: int) -> dict[str, int]:
            return {"b": attention_mask, "a": token_type_ids}

    module = Positional(TypesFirst(), ("input_ids", "attention_mask", "token_type_ids"), ("a", "b"))
    assert module(1, 2, 3) == (3, 2)
