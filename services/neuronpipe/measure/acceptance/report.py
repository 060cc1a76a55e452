"""The report of an acceptance test: the columns of the published figures, for this machine, and other findings."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neuronpipe import __version__
from neuronpipe.stages.neuron_executor.runtimes.neuron import device_count, sdk_words

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
