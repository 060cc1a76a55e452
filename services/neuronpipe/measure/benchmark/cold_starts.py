"""Cold starts: `serve all` from nothing to its first answer, then single requests over loopback.

Serverless platforms bill the time of each request, and the start before the first request.
"""

import os
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TokenizationInput
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.measure.benchmark.measuring import texts_of_length
from neuronpipe.measure.benchmark.results import ColdStart
from neuronpipe.measure.load.inputs import make_input
from neuronpipe.measure.machine import resident_mb
from neuronpipe.measure.processes import ServiceProcess

_NO_CACHE = ("--token-cache-bytes", "0")
# pip compiles packages to byte code as it installs them; the first start compiles a checkout, and does not count.
AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}
_POLL_S = 0.005
_TEXTS = 4


async def measure_cold_starts(
    name: str, folder: Path, backend: str, length: int, starts: int, requests: int
) -> ColdStart:
    """Starts a bundle's service a few times, each time with the kernel's cache of its files emptied; the last process
    answers the requests.

    `length`: tokens of a request; ignored for images.
    """
    (bundle,) = read_repository(folder)
    options = ("--repository", str(folder), "--backend", backend, *_NO_CACHE)
    found: dict[str, Any] = {"model": name, "task": bundle.spec.task, "length": length}
    starts_ms, memory_mb = list[float](), 0.0
    try:
        for number in range(-1, starts):
            drop_files(folder)
            with ServiceProcess("all", *options, environment=AS_INSTALLED) as process:
                async with AsyncClient(process.wait_until_ready().target, retries=False) as client:
                    await _first_answer(client, _request(bundle, "A fine day."))
                    if number >= 0:
                        starts_ms.append((time.monotonic() - process.began_s) * 1e3)
                    if number == starts - 1:
                        found |= await _warm(client, bundle, length, requests)
                memory_mb = max(memory_mb, resident_mb(process.pid))
    except (NeuronpipeError, RuntimeError) as error:
        return ColdStart(model=name, task=bundle.spec.task, length=length, reason=str(error).splitlines()[0])
    found |= {"size_bytes": _size_bytes(folder), "memory_bytes": round(memory_mb * 1e6), "starts_ms": starts_ms}
    return ColdStart(**found)


def drop_files(folder: Path) -> None:
    """Drops the files' content from the kernel's cache, except parts that processes have mapped."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def _first_answer(client: AsyncClient, request: InferRequest) -> None:
    while True:
        try:
            await client.infer(request)
        except Unavailable:
            time.sleep(_POLL_S)  # noqa: ASYNC251 (nothing else runs)
        else:
            return


async def _warm(client: AsyncClient, bundle: Bundle, length: int, requests: int) -> dict[str, list[float]]:
    """Returns the model's time and the rest of each request, in ms."""

    async def count_tokens(text: str) -> int:
        input = TaskInput(tokenization=TokenizationInput(text=text))
        answer = await client.infer(InferRequest(model=bundle.spec.name, input=input))
        return len(answer.result.tokenization.tokens)

    texts = await texts_of_length(count_tokens, 0 if bundle.spec.image else length, _TEXTS)
    task_requests = [_request(bundle, text) for text in texts]
    for request in task_requests:
        await client.infer(request)
    times_ms: dict[str, list[float]] = {"model_ms": [], "overhead_ms": []}
    for request in islice(cycle(task_requests), requests):
        began_s = time.perf_counter()
        answer: InferResponse = await client.infer(request)
        latency_ms = (time.perf_counter() - began_s) * 1e3
        times_ms["model_ms"].append(answer.timings.predict_compute_ns / 1e6)
        times_ms["overhead_ms"].append(latency_ms - times_ms["model_ms"][-1])
    return times_ms


def _request(bundle: Bundle, text: str) -> InferRequest:
    return InferRequest(model=bundle.spec.name, input=make_input(bundle.spec.task, text))
