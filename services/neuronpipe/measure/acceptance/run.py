"""The acceptance test of a back end: real models on the hardware of this machine, with a report in one folder.

All models are compiled before any is measured, and each is measured in a process of its own (measure.py): a runtime may
own its cores until its process ends, and a crash ends that process only. The report has the columns of the published
figures, for this machine, and other findings.
"""

import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe import __version__
from neuronpipe.bundles.buckets import Bucket
from neuronpipe.compiler import Compiled, CompileRequest, compile_with_reference
from neuronpipe.compiler.accuracy import agreement, largest_difference
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.acceptance.handover import (
    FOUND_FILE,
    REQUEST_FILE,
    MeasureRequest,
    error_text,
    output_file,
    read_arrays,
    write_arrays,
)
from neuronpipe.stages.neuron_executor.runtimes.neuron import DOUBLE_SUFFIX, device_count, sdk_words

_PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers", "openvino", "numpy")
_DOUBLE = "made on the contract double of the Neuron SDK: its times say nothing of Neuron"
_COLUMNS = (
    "Model",
    "Back end",
    "dtype",
    "Shape",
    "Cores",
    "In flight",
    "Throughput /s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "Cost per 1M",
)
# The instance type, and the version of the loaded driver.
_INSTANCE = Path("/sys/devices/virtual/dmi/id/product_name")
_DRIVER = Path("/sys/module/neuron/version")
_MAX_TEXT = 600


def describe_machine() -> dict[str, Any]:
    """The properties of the machine that the figures depend on, by name."""
    return {
        "instance": _read(_INSTANCE) or "unknown",
        "Neuron devices": device_count(),
        "Neuron driver": _read(_DRIVER) or "none",
        "platform": platform.platform(),
        "CPUs": os.cpu_count(),
        "Python": sys.version.split()[0],
        "neuronpipe": __version__,
        **{package: _version(package) for package in _PACKAGES},
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(found: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield "# Acceptance report"
    yield ""
    if any(model.get("is_double") for model in found["models"]):
        yield f"**This report was {_DOUBLE}.**"
        yield ""
    yield (
        f"Full batches for {found['seconds']:g} s a row on all cores, without a pipeline around the model; latency "
        "is that of a batch. Of models that generate: new tokens a second of so many texts in flight, each of half the "
        "shape's tokens after a prompt of the other half, on one core; latency is that of a step."
    )
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for model in found["models"]:
        for one in model.get("figures", ()):
            cost = f"${one['cost_per_million']}" if "cost_per_million" in one else "unknown"
            backend = f"{model['backend']}, the double" if model["is_double"] else model["backend"]
            cells = [model["name"], backend, model["dtype"], one["shape"], model["cores"], one["in_flight"]]
            cells += [one["throughput_per_s"], one["p50_ms"], one["p95_ms"], one["p99_ms"], cost]
            yield f"| {' | '.join(map(str, cells))} |"
    for model in found["models"]:
        yield from _model(model)
    yield ""
    yield "## Machine"
    yield ""
    yield from (f"- {name}: {value}" for name, value in found["machine"].items())


def _model(model: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {model['name']}"
    yield ""
    yield f"- source: {model['source']}"
    yield from (f"- **failed**, {name}: `{_one_line(text)}`" for name, text in model["errors"].items())
    if parity := model.get("parity"):
        agreement = "" if parity["agreement"] is None else f", agreement {parity['agreement']:.4f}"
        yield (
            f"- parity with PyTorch float32, {parity['texts']} texts on each core ({parity['cores']}): "
            "largest difference "
            f"{parity['largest_difference']:.2e} (largest output {parity['largest_output']:.3g}){agreement}; "
            "between cores "
            f"{parity['largest_difference_of_cores']:.2e}"
        )
    if emulator := (model.get("accuracy_of_compilation") or {}).get("emulator"):
        yield f"- the difference in the bundle itself is of {emulator}"
    yield from (
        f"- {words}: {model[key]} s" for key, words in (("compile_s", "compile"), ("load_s", "load")) if key in model
    )
    for figures in model.get("figures", ()):
        if "prompt_tokens_per_s" in figures:
            rate = figures["prompt_tokens_per_s"]
            yield f"- prompts at {figures['shape']}, {figures['in_flight']} in flight: {rate} tokens a second"
    memory = {"host memory": model.get("host_memory_bytes"), "device memory": model.get("device_memory_bytes")}
    yield from (f"- {name}: {value / 2**20:.0f} MiB" for name, value in memory.items() if value)
    yield from (f"- compiled with {name} {version}" for name, version in model.get("versions", {}).items())
    # The last line; tracebacks are in report.json.
    yield from (
        f"- refused, {name}: `{_one_line(sdk_words(text))}`" for name, text in model.get("refusals", {}).items()
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("`", "'")
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]} …"


_MEASURE = "neuronpipe.measure.acceptance.measure"
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """The models, shapes and limits of an acceptance test.

    Each of `models` is compiled, and measured at each of `shapes` on `cores` cores (0: all). `environment` is added to
    that of the measuring processes. `price_per_hour` is that of the machine, 0 if unknown.
    """

    models: Sequence[CompileRequest]
    shapes: Sequence[Bucket]
    folder: Path
    cores: int
    environment: Mapping[str, str]
    seconds: float
    price_per_hour: float


def accept(request: AcceptRequest, report: Callable[[str], None]) -> Path:
    """Runs everything and writes report.md and report.json, failures included.

    Raises SetupError for a folder that cannot be written.
    """
    found: dict[str, Any] = {"machine": describe_machine(), "seconds": request.seconds, "models": []}
    _write(found, request.folder)
    compiled: list[tuple[Compiled, dict[str, Any]]] = []
    for model in request.models:
        report(f"{model.name}: compile")
        one: dict[str, Any] = {
            "name": model.name,
            "source": model.source,
            "backend": model.backend,
            "dtype": model.dtype,
            "errors": {},
        }
        found["models"].append(one)
        if made := _compile(model, one, report):
            compiled.append((made, one))
        _write(found, request.folder)  # after each step, so that a later crash does not lose the findings
    for made, one in compiled:
        report(f"{one['name']}: measure")
        try:
            _measure(made, one, request, report)
        except Exception as error:  # a failure is a line of the report, and the next model follows
            one["errors"]["measure"] = error_text(error)
        _write(found, request.folder)
    for one in found["models"]:
        for step, text in one["errors"].items():
            report(f"{one['name']}: FAILED, {step}: {text}")
    return request.folder / "report.md"


def _write(found: Mapping[str, Any], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
        (folder / "report.md").write_text(describe(found))
    except OSError as error:
        raise SetupError(f"{folder}: cannot be written: {os.strerror(error.errno or 0)}; see --out") from error


def _compile(model: CompileRequest, one: dict[str, Any], report: Callable[[str], None]) -> Compiled | None:
    began_s = time.monotonic()
    try:
        made = compile_with_reference(model, report)
    except SetupError as error:
        one["errors"]["compile"] = str(error)
        return None
    except Exception as error:  # a model or a compiler may raise anything
        one["errors"]["compile"] = error_text(error)
        return None
    artifact = made.bundle.artifact(model.backend)
    one["compile_s"] = round(time.monotonic() - began_s, 1)
    one["versions"] = dict(artifact.versions)
    one["is_double"] = any(version.endswith(DOUBLE_SUFFIX) for version in artifact.versions.values())
    one["accuracy_of_compilation"] = artifact.accuracy.model_dump(mode="json") if artifact.accuracy else None
    return made


def _measure(made: Compiled, one: dict[str, Any], request: AcceptRequest, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="neuronpipe-accept-") as name:
        folder = Path(name)
        given = made.batches or [dataclasses.asdict(text) for text in made.texts]
        for number, batch in enumerate(given):
            write_arrays(folder / f"in-{number}.npz", batch)
        shapes = list(map(str, request.shapes))
        asked = MeasureRequest(
            str(made.bundle.folder), one["backend"], request.cores, shapes, request.seconds, len(given)
        )
        (folder / REQUEST_FILE).write_text(json.dumps(dataclasses.asdict(asked)))
        code, lines = _run(folder, request.environment, report)
        if (folder / FOUND_FILE).exists():
            one |= json.loads((folder / FOUND_FILE).read_text())
        errors = one["errors"]
        if code != 0:
            ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
            errors["measure"] = f"the process ended with {ended}: {' | '.join(lines)}"
        outputs = _outputs(folder, one.get("cores", 0), len(made.batches))
        if made.batches and outputs:
            one["parity"] = _parity(made, outputs)
        if not np.isfinite(one.get("parity", {}).get("largest_difference", 0.0)):
            errors["parity"] = "some outputs are not numbers"
        for figures in one.get("figures", ()):
            if request.price_per_hour and not one["is_double"]:
                figures["cost_per_million"] = round(
                    1e6 * request.price_per_hour / 3600 / figures["throughput_per_s"], 4
                )


def _run(folder: Path, environment: Mapping[str, str], report: Callable[[str], None]) -> tuple[int, Sequence[str]]:
    """The exit code and the last lines of a process that measures."""
    lines = deque[str](maxlen=_LAST_LINES)
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", _MEASURE, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )
    with process:
        try:
            for line in process.stdout or ():
                if line.strip():
                    report(f"  {line.rstrip()}")
                    lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    return process.returncode, lines


def _outputs(folder: Path, cores: int, batches: int) -> list[list[dict[str, Any]]]:
    """The outputs of every batch, for each core that computed all of them."""
    files = [[folder / output_file(core, number) for number in range(batches)] for core in range(cores)]
    return [[read_arrays(file) for file in of_core] for of_core in files if all(file.exists() for file in of_core)]


def _parity(made: Compiled, outputs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The difference of the back end to PyTorch in float32 on the worst core, and the difference between cores."""
    task, batches, reference = made.bundle.spec.task, made.batches, made.reference
    per_token = {output.name for output in made.bundle.spec.outputs if "tokens" in output.axes}
    agreements = [agreement(task, of_core, reference, batches) for of_core in outputs]
    return {
        "texts": sum(len(next(iter(batch.values()))) for batch in batches),
        "cores": len(outputs),
        "largest_output": max(float(np.abs(array).max()) for one in reference for array in one.values()),
        "largest_difference": max(largest_difference(per_token, of_core, reference, batches) for of_core in outputs),
        "agreement": None if None in agreements else min(value for value in agreements if value is not None),
        "largest_difference_of_cores": max(
            largest_difference(per_token, of_core, outputs[0], batches) for of_core in outputs
        ),
    }
