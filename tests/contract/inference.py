"""Runs inputs through the whole pipeline, stages in this process, for tests that compare results with a reference."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.core.config import EngineSettings, PipelineSettings, TokenCacheSettings
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Call
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.local import local_stages


async def infer_all(bundle_folder: Path, inputs: Sequence[TaskInput]) -> list[TaskResult]:
    """The results of one model for all inputs, which run side by side, so that batches of many lengths form."""
    bundle = read_bundle(bundle_folder)
    settings = PipelineSettings(max_requests_in_flight=len(inputs))
    async with local_stages([bundle], EngineSettings(), TokenCacheSettings()) as stages:
        pipeline = Pipeline(ModelTable({bundle.key: bundle.spec}), stages, settings)
        requests = [InferRequest(model=bundle.spec.name, input=input) for input in inputs]
        responses = await asyncio.gather(*(pipeline.infer(request, Call()) for request in requests))
    return [response.result for response in responses]
