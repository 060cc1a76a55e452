"""Runs inputs through the whole pipeline, stages in this process, for tests that compare results with a reference."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.core.calls import Call
from neuronpipe.core.metrics import Telemetry
from neuronpipe.serve.settings import AllSettings
from neuronpipe.serve.stages import running_stages
from tests.servers.door import door_of


async def infer_all(bundle_folder: Path, inputs: Sequence[TaskInput], **changes: Any) -> list[TaskResult]:
    """The results of one model for all inputs, which run side by side, so that batches of many lengths form.

    `changes`: settings other than the defaults.
    """
    bundle = read_bundle(bundle_folder)
    settings = AllSettings.of(repository=bundle_folder, max_requests_in_flight=len(inputs), **changes)
    async with running_stages(settings, Telemetry(), lambda stage, is_reached: None, [bundle]) as stages:
        for table in stages.near:
            await table.open(bundle)
        door = door_of([bundle.spec], stages.functions, settings.gateway.pipeline)
        requests = [InferRequest(model=bundle.spec.name, input=input) for input in inputs]
        responses = await asyncio.gather(*(door.infer(request, Call()) for request in requests))
    return [response.result for response in responses]
