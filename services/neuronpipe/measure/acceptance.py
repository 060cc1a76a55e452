"""The acceptance test of a back end: real models on the hardware of this machine, with a report in one folder.

All models are compiled before any is measured, and each is measured in a process of its own (acceptance_process.py): a
runtime may own its cores until its process ends, and a crash ends that process only. The report has the columns of the
published figures, for this machine, and other findings.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.compiler import Compiled, CompileRequest, compile_with_reference
from neuronpipe.compiler.accuracy import agreement, largest_difference
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.measure.acceptance_process import MeasureRequest, error_text, measure
from neuronpipe.measure.figures import markdown_table
from neuronpipe.measure.machine import describe_machine, package_versions
from neuronpipe.platform.process.worker import ProcessEnded, Worker
from neuronpipe.stages.neuron_executor.runtimes.neuron import DOUBLE_SUFFIX, device_count, sdk_words

_DOUBLE = "made on the contract double of the Neuron SDK: its times say nothing of Neuron"
_COLUMNS = (
    *("Model", "Back end", "dtype", "Shape", "Cores", "In flight"),
    *("Throughput /s", "p50 ms", "p95 ms", "p99 ms", "Cost per 1M"),
)
_DRIVER = Path("/sys/module/neuron/version")  # the loaded driver's
_MAX_TEXT = 600
_LAST_LINES = 8


def _describe_machine() -> dict[str, str]:
    return describe_machine() | {
        "Neuron devices": str(device_count()),
        "Neuron driver": _DRIVER.read_text().strip() if _DRIVER.exists() else "none",
        "Neuron SDK": package_versions("torch-neuronx", "neuronx-cc", "libneuronxla"),
    }


def describe(findings: Mapping[str, Any]) -> str:
    """Returns the report as Markdown."""
    return "\n".join(_lines(findings)) + "\n"


def _lines(findings: Mapping[str, Any]) -> Iterator[str]:
    models = findings["models"]
    yield from ("# Acceptance report", "")
    if any(model.get("is_double") for model in models):
        yield from (f"**This report was {_DOUBLE}.**", "")
    yield (
        f"Full batches for {findings['seconds']:g} s a row on all cores, without a pipeline around the model; latency "
        "is that of a batch. Models that generate: new tokens a second of the texts in flight, each of half the "
        "shape's tokens after a prompt of the other half, on one core; latency is that of a step."
    )
    yield ""
    yield from markdown_table(
        _COLUMNS, (_row(model, figures) for model in models for figures in model.get("figures", ()))
    )
    for model in models:
        yield from ("", f"## {model['name']}", "")
        yield from (f"- {fact}" for fact in _facts(model))
    yield from ("", "## Machine", "")
    yield from (f"- {name}: {value}" for name, value in findings["machine"].items())


def _row(model: Mapping[str, Any], figures: Mapping[str, Any]) -> Iterator[object]:
    yield from (model["name"], model["backend"] + ", the double" * model["is_double"], model["dtype"])
    yield from (figures["shape"], model["cores"], figures["in_flight"], figures["throughput_per_s"])
    yield from (figures["p50_ms"], figures["p95_ms"], figures["p99_ms"])
    yield f"${figures['cost_per_million']}" if "cost_per_million" in figures else "unknown"


def _facts(model: Mapping[str, Any]) -> Iterator[str]:
    yield f"source: {model['source']}"
    yield from (f"**failed**, {name}: `{_one_line(text)}`" for name, text in model["errors"].items())
    if parity := model.get("parity"):
        agreement = "" if parity["agreement"] is None else f", agreement {parity['agreement']:.4f}"
        yield (
            f"parity with PyTorch float32, {parity['texts']} texts on each core ({parity['cores']}): largest "
            f"difference {parity['largest_difference']:.2e} (largest output {parity['largest_output']:.3g}){agreement}"
            f"; between cores {parity['largest_difference_of_cores']:.2e}"
        )
    if emulator := (model.get("accuracy_of_compilation") or {}).get("emulator"):
        yield f"the difference in the bundle itself is of {emulator}"
    yield from (f"{step}: {model[f'{step}_s']} s" for step in ("compile", "load") if f"{step}_s" in model)
    for figures in model.get("figures", ()):
        if rate := figures.get("prompt_tokens_per_s"):
            yield f"prompts at {figures['shape']}, {figures['in_flight']} in flight: {rate} tokens a second"
    memory = {name: model.get(f"{name}_memory_bytes") for name in ("host", "device")}
    yield from (f"{name} memory: {value / 2**20:.0f} MiB" for name, value in memory.items() if value)
    yield from (f"compiled with {name} {version}" for name, version in model.get("versions", {}).items())
    # Only the last line of each error; report.json has the tracebacks.
    yield from (f"refused, {name}: `{_one_line(sdk_words(text))}`" for name, text in model.get("refusals", {}).items())


def _one_line(text: str) -> str:
    line = " ".join(text.split()).replace("`", "'")
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]} …"


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """The models, shapes and limits of an acceptance test.

    The test compiles `models`, and measures each at `shapes` on `cores` cores (0: all). `environment`: added to
    the environment of the measuring processes. `price_per_hour`: the price of the machine; 0 if unknown.
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

    Raises SetupError if the folder cannot be written.
    """
    findings: dict[str, Any] = {"machine": _describe_machine(), "seconds": request.seconds, "models": []}
    _write(findings, request.folder)
    compiled: list[tuple[Compiled, dict[str, Any]]] = []
    for model in request.models:
        report(f"{model.name}: compile")
        facts = {name: getattr(model, name) for name in ("name", "source", "backend", "dtype")}
        model_findings: dict[str, Any] = {**facts, "errors": {}}
        findings["models"].append(model_findings)
        if made := _compile(model, model_findings, report):
            compiled.append((made, model_findings))
        _write(findings, request.folder)  # after each step, so that a later crash does not lose the findings
    for made, model_findings in compiled:
        report(f"{model_findings['name']}: measure")
        try:
            _measure(made, model_findings, request, report)
        except Exception as error:  # a failure is a line of the report, and the next model follows
            model_findings["errors"]["measure"] = error_text(error)
        _write(findings, request.folder)
    for model_findings in findings["models"]:
        for step, text in model_findings["errors"].items():
            report(f"{model_findings['name']}: FAILED, {step}: {text}")
    return request.folder / "report.md"


def _write(findings: Mapping[str, Any], folder: Path) -> None:
    with reporting_os_errors(f"{folder}: cannot be written", "; see --out"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(findings, indent=2) + "\n")
        (folder / "report.md").write_text(describe(findings))


def _compile(model: CompileRequest, findings: dict[str, Any], report: Callable[[str], None]) -> Compiled | None:
    began_s = time.monotonic()
    try:
        made = compile_with_reference(model, report)
    except Exception as error:  # a model or a compiler may raise anything
        findings["errors"]["compile"] = str(error) if isinstance(error, SetupError) else error_text(error)
        return None
    artifact = made.bundle.artifact(model.backend)
    findings["compile_s"] = round(time.monotonic() - began_s, 1)
    findings["versions"] = dict(artifact.versions)
    findings["is_double"] = any(version.endswith(DOUBLE_SUFFIX) for version in artifact.versions.values())
    findings["accuracy_of_compilation"] = artifact.accuracy.model_dump(mode="json") if artifact.accuracy else None
    return made


def _measure(made: Compiled, findings: dict[str, Any], request: AcceptRequest, report: Callable[[str], None]) -> None:
    outputs: list[list[dict[str, Any]]] = []
    with tempfile.NamedTemporaryFile("r", prefix="neuronpipe-accept-", errors="replace") as log:
        measure_request = MeasureRequest(
            bundle=made.bundle.folder,
            backend=findings["backend"],
            cores=request.cores,
            shapes=request.shapes,
            seconds=request.seconds,
            batches=made.batches,
            texts=made.texts,
            environment=request.environment,
        )
        try:
            with Worker.started(measure, measure_request, name="measuring", log=Path(log.name)) as worker:
                while (message := worker.receive()) is not None:
                    if isinstance(message, str):
                        report(f"  {message}")
                    elif isinstance(message, list):
                        outputs.append(message)
                    else:
                        findings |= message
        except ProcessEnded as ended:
            lines = [line.strip() for line in log if line.strip()]
            findings["errors"]["measure"] = f"{ended}: {' | '.join(lines[-_LAST_LINES:])}"
    if made.batches and outputs:
        findings["parity"] = _parity(made, outputs)
    if not np.isfinite(findings.get("parity", {}).get("largest_difference", 0.0)):
        findings["errors"]["parity"] = "some outputs are not numbers"
    for figures in findings.get("figures", ()):
        if request.price_per_hour and not findings["is_double"]:
            cost = 1e6 * request.price_per_hour / 3600 / figures["throughput_per_s"]
            figures["cost_per_million"] = round(cost, 4)


def _parity(made: Compiled, outputs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns the difference from PyTorch in float32 on the worst core, and the difference between cores."""
    task, batches, reference = made.bundle.spec.task, made.batches, made.reference
    per_token = {output.name for output in made.bundle.spec.outputs if "tokens" in output.axes}

    def difference(expected: Sequence[Mapping[str, Any]]) -> float:
        return max(largest_difference(per_token, core_outputs, expected, batches) for core_outputs in outputs)

    agreements = [agreement(task, core_outputs, reference, batches) for core_outputs in outputs]
    measured_agreements = [value for value in agreements if value is not None]
    return {
        "texts": sum(len(next(iter(batch.values()))) for batch in batches),
        "cores": len(outputs),
        "largest_output": max(float(np.abs(array).max()) for batch in reference for array in batch.values()),
        "largest_difference": difference(reference),
        "agreement": min(measured_agreements) if len(measured_agreements) == len(agreements) else None,
        "largest_difference_of_cores": difference(outputs[0]),
    }
