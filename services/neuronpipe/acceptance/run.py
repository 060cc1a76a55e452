"""What a back end does with real models on the hardware of this machine, in one folder to send back."""

import asyncio
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe import __version__
from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.buckets import Bucket
from neuronpipe.core.config import EngineSettings
from neuronpipe.core.errors import SetupError
from neuronpipe.core.neuron import core_count
from neuronpipe.neuron_executor.backends import load_backend
from neuronpipe.neuron_executor.backends.base import Backend, BackendError, LoadRequest
from neuronpipe.neuron_executor.batching import pad
from neuronpipe.neuron_executor.neuron_monitor import running_monitor

_IN_FLIGHT = (1, 2)
_WARM_UP_RUNS = 10
_PACKAGES = ("torch", "torch-neuronx", "neuronx-cc", "transformers", "openvino", "numpy")
_DOUBLE = "made on the contract double of the Neuron SDK: its times say nothing of Neuron"


@dataclass(frozen=True, slots=True)
class AcceptRequest:
    """Each of `models` is compiled and measured at each of `shapes`; `price_per_hour` is that of the machine, 0 for unknown."""

    models: Sequence[CompileRequest]
    shapes: Sequence[Bucket]
    folder: Path
    cores: int | str
    seconds: float
    price_per_hour: float


def accept(request: AcceptRequest, report: Callable[[str], None]) -> Path:
    """Runs everything and writes report.md and report.json, also of what fails. Raises SetupError for a folder that cannot be written."""
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(f"{request.folder}: cannot be made: {os.strerror(error.errno or 0)}; see --out") from error
    found: dict[str, Any] = {"machine": _machine(), "models": []}
    for model in request.models:
        report(f"{model.name}: compile, then measure {', '.join(map(str, request.shapes))}")
        found["models"].append(_accept_model(model, request))
        # After each model, so that what is known is there whatever the next one does.
        (request.folder / "report.json").write_text(json.dumps(found, indent=2) + "\n")
        (request.folder / "report.md").write_text(_describe(found, request))
    return request.folder / "report.md"


def _machine() -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "cpus": os.cpu_count(),
        "neuronpipe": __version__,
        **versions,
    }


def _accept_model(model: CompileRequest, request: AcceptRequest) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "source": model.source, "backend": model.backend, "dtype": model.dtype, "errors": {}}
    began_s = time.monotonic()
    try:
        bundle = compile_bundle(model, lambda line: None)
        found["compile_s"] = round(time.monotonic() - began_s, 1)
        artifact = bundle.artifact(model.backend)
        found["versions"] = artifact.versions
        found["accuracy"] = artifact.accuracy.model_dump(mode="json") if artifact.accuracy else None
        began_s = time.monotonic()
        backend = _load(bundle, model.backend, request.cores)
        found["load_s"] = round(time.monotonic() - began_s, 1)
    except SetupError as error:
        found["errors"]["setup"] = str(error)
        return found
    try:
        found["cores"] = backend.cores
        asyncio.run(_measure(found, backend, bundle, request))
    except BackendError as error:
        found["errors"]["run"] = _chain(error)
    finally:
        backend.close()
    return found


def _load(bundle: Bundle, name: str, cores: int | str) -> Backend:
    artifact = bundle.artifact(name)
    count = core_count(cores) if name == "neuronx" else EngineSettings(cores=cores).core_count
    files = bundle.artifact_files(artifact)
    load = LoadRequest(
        bundle.spec, files, artifact.properties, count, 0, in_flight=max(_IN_FLIGHT), buckets=artifact.buckets, versions=artifact.versions
    )
    return load_backend(name, load)


async def _measure(found: dict[str, Any], backend: Backend, bundle: Bundle, request: AcceptRequest) -> None:
    spec = bundle.spec
    sequence = {"input_ids": np.arange(3, dtype=np.int32) % spec.vocabulary_size}
    inputs = {
        shape: pad([sequence | {"input_ids": np.resize(sequence["input_ids"], shape.tokens)}] * shape.batch, shape.tokens, spec)
        for shape in request.shapes
    }
    found["cores_agree"] = await _cores_agree(backend, inputs[request.shapes[0]])
    if backend.buckets:
        largest = backend.buckets.largest
        too_long = {name: np.ones((1, largest.tokens + 1), np.int64) for name in spec.inputs}
        found["errors"]["a shape that was not compiled"] = await _error(backend, too_long)
    if texts := getattr(backend, "error_texts", None):
        found["errors"] |= await asyncio.to_thread(texts)
    found["figures"] = []
    async with running_monitor() as monitor:
        for shape, batch in inputs.items():
            for in_flight in _IN_FLIGHT[: backend.in_flight]:
                figures = await _throughput(backend, batch, in_flight, request.seconds)
                figures |= {"shape": str(shape), "in_flight": in_flight}
                if request.price_per_hour and figures["throughput_per_s"]:
                    figures["cost_per_million"] = round(1e6 * request.price_per_hour / 3600 / figures["throughput_per_s"], 4)
                found["figures"].append(figures)
        snapshot = monitor.snapshot if monitor else None
        found["device_memory_bytes"] = snapshot.device_memory_bytes if snapshot else None
        found["host_memory_bytes"] = _resident_bytes()


async def _cores_agree(backend: Backend, batch: Mapping[str, Any]) -> bool:
    first = await backend.run(0, batch)
    others = [await backend.run(core, batch) for core in range(1, backend.cores)]
    return all(np.allclose(one[name], array, atol=1e-3) for one in others for name, array in first.items())


async def _error(backend: Backend, batch: Mapping[str, Any]) -> str:
    try:
        await backend.run(0, batch)
    except BackendError as error:
        return _chain(error)
    return "NOT REFUSED"


def _chain(error: BaseException) -> str:
    cause = error.__cause__
    return f"{type(error).__name__}: {error}" + (f" <- {type(cause).__name__}: {cause}" if cause else "")


async def _throughput(backend: Backend, batch: Mapping[str, Any], in_flight: int, seconds: float) -> dict[str, Any]:
    """Full batches on every core for so long, each with so many in flight; latency is that of a batch."""
    rows, latencies = len(batch["input_ids"]), list[float]()

    async def call(core: int, end_s: float) -> None:
        while (began_s := time.monotonic()) < end_s:
            await backend.run(core, batch)
            latencies.append(time.monotonic() - began_s)

    for core in range(backend.cores):
        for _ in range(_WARM_UP_RUNS):
            await backend.run(core, batch)
    began_s = time.monotonic()
    await asyncio.gather(*(call(core, began_s + seconds) for core in range(backend.cores) for _ in range(in_flight)))
    took_s = time.monotonic() - began_s
    p50, p95, p99 = (round(1000 * float(value), 3) for value in np.percentile(latencies, (50, 95, 99)))
    return {"throughput_per_s": round(rows * len(latencies) / took_s, 1), "p50_ms": p50, "p95_ms": p95, "p99_ms": p99}


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _describe(found: Mapping[str, Any], request: AcceptRequest) -> str:
    """The columns of docs' published figures, for this machine."""
    lines = ["# Acceptance report", "", *(f"- {name}: {value}" for name, value in found["machine"].items()), ""]
    if any("+double" in str(model.get("versions")) for model in found["models"]):
        lines += [f"**This report was {_DOUBLE}.**", ""]
    lines += [
        "| Model | Back end | dtype | Shape | Cores | In flight | Throughput /s | p50 ms | p95 ms | p99 ms | Cost per 1M |",
        "|---" * 11 + "|",
    ]
    for model in found["models"]:
        for one in model.get("figures", ()):
            cost = f"${one['cost_per_million']}" if "cost_per_million" in one else "unknown"
            cells = [model["name"], model["backend"], model["dtype"], one["shape"], model["cores"], one["in_flight"]]
            cells += [one["throughput_per_s"], one["p50_ms"], one["p95_ms"], one["p99_ms"], cost]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    for model in found["models"]:
        lines += ["", f"## {model['name']}", "", f"- source: {model['source']}"]
        keys = ("compile_s", "load_s", "versions", "accuracy", "cores_agree", "host_memory_bytes", "device_memory_bytes")
        lines += [f"- {key}: {model[key]}" for key in keys if model.get(key) is not None]
        lines += [f"- error text, {name}: `{' '.join(text.split())}`" for name, text in model["errors"].items()]
    return "\n".join(lines) + f"\n\nMeasured for {request.seconds:g} s a row with full batches, without a pipeline around the model.\n"
