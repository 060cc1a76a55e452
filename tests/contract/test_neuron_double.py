"""The contract double of torch_neuronx keeps what AWS documents of it: what our code may rely on, and what it must not
do.
"""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.sampled

_FLAGS = "--target=inf2 --auto-cast=none"
_IDS = torch.ones(2, 3, dtype=torch.int64)
_EXAMPLE = (_IDS, _IDS)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.linear(self.embedding(ids)) * mask[..., None],)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(20261121)
    return _Model().eval()


@pytest.fixture
def sdk(neuron_double: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch_neuronx in a process that has just started, on a machine with two devices of its own."""
    module = importlib.import_module("torch_neuronx")
    monkeypatch.setenv("NEURON_DOUBLE_FOLDER", str(tmp_path / "neuron"))
    module._runtime.restart_process()
    yield module
    module._runtime.restart_process()


@pytest.fixture
def traced(sdk: Any, model: torch.nn.Module) -> Any:
    """On a core."""
    return sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)


def _python(program: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_public_names_are_the_documented_ones(sdk: Any) -> None:
    public = {name for name in vars(sdk) if not name.startswith("_")} - {"Any", "experimental"}
    assert public == {"trace", "move_trace_to_device", "neuron_cores_context"}
    with pytest.raises(AttributeError):
        sdk.get_neuron_cores()


def test_version_says_that_it_is_a_double(sdk: Any) -> None:
    assert sdk.__version__.endswith("+double")


def test_placement_in_experimental_warns(sdk: Any) -> None:
    with pytest.warns(UserWarning, match="torch_neuronx.experimental.neuron_cores_context will be removed"):
        assert importlib.import_module("torch_neuronx.experimental").neuron_cores_context


@pytest.mark.parametrize(
    ("release", "said"),
    [("2.24", "False True matmult 2.7.0.2.8.6734+double"), ("2.26", "True True matmult"), ("2.29", "True True none")],
)
def test_releases_differ_in_the_place_of_placement_and_in_the_default_cast(
    neuron_double: Mapping[str, str], release: str, said: str
) -> None:
    program = (
        "import torch_neuronx as t; from torch_neuronx._flags import parse; "
        "print(*(hasattr(one, 'neuron_cores_context') for one in (t, t.experimental)), parse(None)['--auto-cast'], "
        "t.__version__)"
    )
    assert _python(program, {"NEURON_DOUBLE_SDK": release}).stdout.startswith(said)


@pytest.mark.parametrize(
    "example", [[_IDS, _IDS], {"ids": _IDS}, (_IDS, [1]), ()], ids=lambda example: type(example).__name__
)
def test_example_inputs_are_a_tensor_or_a_tuple(sdk: Any, model: torch.nn.Module, example: Any) -> None:
    with pytest.raises(TypeError, match="example_inputs"):
        sdk.trace(model, example, compiler_args=_FLAGS)


def test_positional_arguments_and_unknown_keywords_of_trace_are_errors(sdk: Any, model: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match="are keywords"):
        sdk.trace(model, _EXAMPLE, {}, None)
    with pytest.raises(TypeError, match="compiler_arg"):
        sdk.trace(model, _EXAMPLE, compiler_arg=_FLAGS)


@pytest.mark.parametrize(
    "flags",
    [
        "--auto-cast=matmul",
        "-O4",
        "--optlevel 4",
        "--fast",
        "--target=inf1",
        ["--target"],
        "--auto-cast=none --auto-cast-type=bf16",
    ],
    ids=str,
)
def test_unknown_compiler_flags_are_refused(sdk: Any, model: torch.nn.Module, flags: Any) -> None:
    with pytest.raises(RuntimeError, match="neuronx-cc: error"):
        sdk.trace(model, _EXAMPLE, compiler_args=flags)


def test_without_a_device_trace_needs_the_cpu_and_a_target(
    sdk: Any, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_DOUBLE_DEVICES", "0")
    with pytest.raises(RuntimeError, match="num_devices > 0"):
        sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)
    with pytest.raises(RuntimeError, match="please supply compiler argument target"):
        sdk.trace(model, _EXAMPLE, compiler_args="--auto-cast=none", cpu_backend=True)
    module = sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS, cpu_backend=True)
    with pytest.raises(RuntimeError):
        module(*_EXAMPLE)


def test_a_trace_is_called_by_position_and_computes_what_the_model_does(traced: Any, model: torch.nn.Module) -> None:
    assert isinstance(traced, torch.jit.ScriptModule)
    torch.testing.assert_close(traced(*_EXAMPLE), model(*_EXAMPLE))
    with pytest.raises(RuntimeError):
        traced(ids=_IDS, mask=_IDS)


def test_later_changes_of_the_model_do_not_change_its_trace(traced: Any, model: torch.nn.Module) -> None:
    (before,) = traced(*_EXAMPLE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(traced(*_EXAMPLE)[0], before)


def test_matrices_in_bfloat16_differ_a_little(sdk: Any, model: torch.nn.Module) -> None:
    cast = sdk.trace(model, _EXAMPLE, compiler_args="--target=inf2 --auto-cast=matmult --auto-cast-type=bf16")
    difference = (cast(*_EXAMPLE)[0] - model(*_EXAMPLE)[0]).abs().max()
    assert 0 < difference < 0.05
    assert cast(*_EXAMPLE)[0].dtype == torch.float32


_LAST_LINE = "Incorrect tensor shape at input #0: received 1 3, expected 2 3"


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((_IDS[:1], _IDS[:1]), _LAST_LINE),
        ((_IDS.int(), _IDS), "made up"),
        ((_IDS + (1 << 40), _IDS), "int32"),
        ((_IDS + 20, _IDS), "status=1006"),
        ((_IDS,), "argument"),
        ((_IDS, _IDS, _IDS), "argument"),
    ],
    ids=["shape", "dtype", "int64", "out of the vocabulary", "too few", "too many"],
)
def test_inputs_must_be_what_was_traced(traced: Any, inputs: tuple[torch.Tensor, ...], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        traced(*inputs)


def test_outputs_are_fresh_and_have_no_gradient(traced: Any) -> None:
    (first,), (second,) = traced(*_EXAMPLE), traced(*_EXAMPLE)
    assert first.data_ptr() != second.data_ptr()
    assert not first.requires_grad


def test_an_unused_input_is_warned_of_and_still_required(sdk: Any) -> None:
    class Unused(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return ids * 2

    with pytest.warns(UserWarning, match=r"unused. Tensor will be ignored. \(index=1"):
        module = sdk.trace(Unused().eval(), _EXAMPLE, compiler_args=_FLAGS)
    with pytest.raises(RuntimeError):
        module(_IDS)


def test_a_file_needs_the_import_to_be_read(traced: Any, tmp_path: Path, neuron_double: Mapping[str, str]) -> None:
    torch.jit.save(traced, tmp_path / "model.pt")
    program = f"import torch; torch.jit.load({str(tmp_path / 'model.pt')!r})"
    assert "Unknown" in _python(program, neuron_double).stderr
    assert _python(f"import torch_neuronx; {program}", neuron_double).returncode == 0


def test_a_file_of_a_newer_sdk_is_refused(traced: Any, tmp_path: Path, neuron_double: Mapping[str, str]) -> None:
    torch.jit.save(traced, tmp_path / "model.pt")
    program = f"import torch, torch_neuronx; torch.jit.load({str(tmp_path / 'model.pt')!r})"
    assert "status=2 message=Invalid" in _python(program, {**neuron_double, "NEURON_DOUBLE_SDK": "2.29"}).stderr


def _load(sdk: Any, path: Path, start: int) -> Any:
    with sdk.neuron_cores_context(start_nc=start, nc_count=1):
        return torch.jit.load(path)


def _cores(sdk: Any, module: Any) -> list[int]:
    return [core.index for core in sdk._model.model_of(module).cores]


def test_loads_go_to_the_least_used_core_or_to_the_one_of_the_context(sdk: Any, traced: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(traced, path)
    assert _cores(sdk, traced) == [0]
    assert [_cores(sdk, torch.jit.load(path)) for _ in range(3)] == [[1], [2], [3]]
    assert _cores(sdk, _load(sdk, path, 2)) == [2]
    with sdk.neuron_cores_context(start_nc=0, nc_count=4):
        assert _cores(sdk, torch.jit.load(path)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("start", "count"), [(0, 0), (0, -2), (0, 5), (4, 1), (-2, 1)])
def test_cores_that_are_not_there_are_a_value_error(sdk: Any, start: int, count: int) -> None:
    with pytest.raises(ValueError, match="nc"), sdk.neuron_cores_context(start, count):
        pass


@pytest.mark.parametrize(("visible", "expected"), [("2", [2]), ("1-2", [1, 2]), ("0,3", [0, 3])])
def test_visible_cores_win_over_their_number_and_are_read_once(
    sdk: Any, visible: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
    sdk._runtime.restart_process()
    assert [core.index for core in sdk._runtime.runtime().cores] == expected
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    assert [core.index for core in sdk._runtime.runtime().cores] == expected


def test_what_is_set_after_the_import_is_too_late(neuron_double: Mapping[str, str]) -> None:
    names = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "NEURON_RT_EXEC_TIMEOUT")
    program = f"""
import os, torch_neuronx
for name in {names}:
    os.environ[name] = "1"
    try:
        torch_neuronx._runtime.runtime()
    except RuntimeError as error:
        print(error)
    del os.environ[name]
"""
    said = _python(program, neuron_double).stdout
    assert [f"{name}: set after torch_neuronx was imported" in said for name in names] == [True] * 3
    start = "import torch_neuronx; torch_neuronx._runtime.runtime()"
    assert _python(start, {**neuron_double, **dict.fromkeys(names, "1")}).returncode == 0


def test_a_core_is_of_one_process_until_it_ends(sdk: Any, neuron_double: Mapping[str, str], tmp_path: Path) -> None:
    environment = {**neuron_double, "NEURON_DOUBLE_DEVICES": "2", "NEURON_DOUBLE_FOLDER": str(tmp_path / "neuron")}
    program = "import torch_neuronx; torch_neuronx._runtime.runtime()"
    sdk._runtime.runtime()
    assert "NeuronCore(s) not available - Requested:4 Available:0" in _python(program, environment).stderr
    assert "Requested:nc1-nc1 Available:0" in _python(program, {**environment, "NEURON_RT_VISIBLE_CORES": "1"}).stderr
    sdk._runtime.restart_process()
    assert _python(program, environment).returncode == 0


def test_a_forked_process_cannot_use_the_runtime(sdk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk._runtime.runtime()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="not fork-safe"):
        sdk._runtime.runtime()


def test_a_core_computes_one_thing_at_a_time(sdk: Any, traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (core,) = sdk._model.model_of(traced).cores
    active, most = 0, 0
    fail: Callable[[], None] = core._fail

    def count() -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        fail()
        active -= 1

    monkeypatch.setattr(core, "_fail", count)
    core._time_s = 0.01
    threads = [threading.Thread(target=traced, args=_EXAMPLE) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert core.most_waiting > 1


@pytest.mark.parametrize(("status", "lasts"), [("101", True), ("1203", True), ("5", False)])
def test_a_hardware_fault_lasts_until_the_process_ends(sdk: Any, traced: Any, status: str, lasts: bool) -> None:
    path = sdk._runtime.folder() / "fault-core-0"
    path.write_text(status)
    with pytest.raises(RuntimeError, match=f"status={status}"):
        traced(*_EXAMPLE)
    path.unlink()
    if lasts:
        with pytest.raises(RuntimeError, match=f"status={status}"):
            traced(*_EXAMPLE)
    else:
        traced(*_EXAMPLE)


def test_a_core_that_is_full_refuses_to_load(sdk: Any, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    # 10 x 4 + 4 x 2 + 2 = 50 weights of four bytes.
    monkeypatch.setenv("NEURON_DOUBLE_CORE_BYTES", "399")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "1")
    sdk._runtime.restart_process()
    sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)
    with pytest.raises(RuntimeError, match="status=4 message=Allocation Failure"):
        sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)


@pytest.mark.parametrize(("failure", "error"), [("-9", RuntimeError), ("unsupported", NotImplementedError)])
def test_a_compilation_can_fail(sdk: Any, model: torch.nn.Module, failure: str, error: type[Exception]) -> None:
    (sdk._runtime.folder() / "fault-compile-2x3").write_text(failure)
    with pytest.raises(error):
        sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)


def test_every_trace_compiles_again(
    sdk: Any, model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_DOUBLE_LOG", str(tmp_path / "log"))
    for _ in range(2):
        sdk.trace(model, _EXAMPLE, compiler_args=_FLAGS)
    assert (tmp_path / "log").read_text().count("compile shape=2x3") == 2


class _Sums(torch.nn.Module):
    """Adds up what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = self.sums + given.float()
        return sums.argmax(1).int(), sums, sums.sum(1), given.float()


@pytest.fixture
def summed(sdk: Any) -> Callable[..., Any]:
    def trace(index: int = 1, flags: str = _FLAGS) -> Any:
        module = _Sums().eval()
        return sdk.trace(module, (_IDS,), input_output_aliases={module.sums: index}, compiler_args=flags)

    return trace


@pytest.mark.parametrize("flags", [_FLAGS, "--target=inf2 --auto-cast=matmult --auto-cast-type=bf16"])
def test_a_state_stays_on_its_core_and_is_no_output(
    sdk: Any, summed: Callable[..., Any], tmp_path: Path, flags: str
) -> None:
    torch.jit.save(summed(flags=flags), tmp_path / "model.pt")
    first, second = (torch.jit.load(tmp_path / "model.pt") for _ in range(2))
    for model in (first, second):
        sdk.move_trace_to_device(model, 0)
    found = [first(_IDS)[1][0].item(), first(_IDS)[1][0].item(), second(_IDS)[1][0].item()]
    assert found == [3, 6, 3], "each model has a state of its own"
    assert [output.dtype for output in first(_IDS)] == [torch.int32, torch.float32, torch.float32]


def test_a_state_is_changed_only_by_an_execution_that_ends_well(sdk: Any, summed: Callable[..., Any]) -> None:
    traced, fault = summed(), sdk._runtime.folder() / "fault-core-0"
    sdk.move_trace_to_device(traced, 0)
    traced(_IDS)
    fault.write_text("5")
    with pytest.raises(RuntimeError, match="status=5"):
        traced(_IDS)
    fault.unlink()
    assert traced(_IDS)[1][0] == 6


def test_a_state_is_on_a_core_from_the_move_there_until_it_is_unloaded(sdk: Any, summed: Callable[..., Any]) -> None:
    traced = summed()
    with pytest.raises(RuntimeError, match="states are not on the core; call move_trace_to_device"):
        traced(_IDS)
    sdk.move_trace_to_device(traced, 0)
    traced(_IDS)
    sdk._model.model_of(traced).unload()
    sdk._model.model_of(traced).load(1, 1)
    with pytest.raises(RuntimeError, match="states are not on the core"):
        traced(_IDS)
    sdk.move_trace_to_device(traced, 1)
    assert traced(_IDS)[1][0] == 3, "as it was compiled"


@pytest.mark.parametrize(
    ("index", "message"),
    [(2, r"output 2 is \[2\] torch.float32, its state \[2, 3\] torch.float32"), (0, "int32"), (4, "output 4 is none")],
)
def test_a_state_becomes_an_output_of_its_shape_and_dtype(summed: Callable[..., Any], index: int, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        summed(index)


def test_a_state_is_a_parameter_of_the_module_and_two_have_two_outputs(sdk: Any) -> None:
    module = _Sums().eval()
    module.more = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    for aliases in ({torch.zeros(2, 3): 1}, {module.sums: 1, module.more: 1}):
        with pytest.raises(ValueError, match="input_output_aliases"):
            sdk.trace(module, (_IDS,), input_output_aliases=aliases, compiler_args=_FLAGS)
    with pytest.raises(TypeError, match="a dict, got list"):
        sdk.trace(module, (_IDS,), input_output_aliases=[(module.sums, 1)], compiler_args=_FLAGS)


def test_a_model_with_states_is_on_one_core(sdk: Any, summed: Callable[..., Any], tmp_path: Path) -> None:
    torch.jit.save(summed(), tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="on one core"), sdk.neuron_cores_context(start_nc=0, nc_count=2):
        torch.jit.load(tmp_path / "model.pt")
