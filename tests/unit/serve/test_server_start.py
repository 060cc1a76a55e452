"""What reads a repository at the start may take long, as a bucket that does not answer: the process still ends."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from neuronpipe.core.metrics import Telemetry
from neuronpipe.serve import fronts, server
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages import server as stage_server
from neuronpipe.stages.settings import NeuronExecutorSettings, PostprocessorSettings

pytestmark = pytest.mark.usefixtures("own_signals")

_LIMIT_S = 10
_ADDRESS: dict[str, Any] = {"repository": "s3://bucket/models", "listen": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("module", "serve"),
    [
        (server, partial(server.run, AllSettings.of(**_ADDRESS))),
        (server, partial(server.run, PipelineProcessSettings.of(**_ADDRESS))),
        (fronts, partial(server.run, AllSettings.of(**_ADDRESS, front_processes=1))),
        (stage_server, partial(stage_server.run, NeuronExecutorSettings.of(**_ADDRESS))),
        (stage_server, partial(stage_server.run, PostprocessorSettings.of(**_ADDRESS))),
    ],
    ids=["all", "gateway", "front processes", "neuron-executor", "postprocessor"],
)
async def test_a_process_that_reads_its_repository_at_the_start_ends_by_sigterm(
    monkeypatch: pytest.MonkeyPatch, module: Any, serve: Callable[[Telemetry], Coroutine[Any, Any, None]]
) -> None:
    reads, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def read(*arguments: object, **options: object) -> None:
        loop.call_soon_threadsafe(reads.set)
        may_end.wait(_LIMIT_S)

    monkeypatch.setattr(module, "live_repository", read)
    serving = asyncio.create_task(serve(Telemetry()))
    began_s = time.monotonic()
    await reads.wait()
    assert time.monotonic() - began_s < _LIMIT_S / 2  # and not after the repository was read
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, _LIMIT_S / 2)
    may_end.set()
