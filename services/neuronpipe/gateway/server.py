"""The gateway as a process of its own, and its gRPC services for whoever has a pipeline."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from neuronpipe.api.v1 import inference_pb2, models_pb2
from neuronpipe.api.v1.inference_pb2 import InferBatchRequest, InferBatchResponse, InferRequest, InferResponse, InferStreamResponse
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.background import beside
from neuronpipe.core.config import GatewaySettings
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Stages
from neuronpipe.core.telemetry import Metrics
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.results import running_result_cache
from neuronpipe.rpc.endpoints import follow_endpoints
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE
from neuronpipe.rpc.server import Context, Method, SetServing, call_of, serve

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
MODEL_SERVICE = models_pb2.DESCRIPTOR.services_by_name["ModelService"]

# How long the first requests wait for the gateway's connections; a stage that is there takes milliseconds.
_CONNECT_LIMIT_S = 1.0


def gateway_methods(pipeline: Pipeline, catalog: Catalog) -> Mapping[str, Method]:
    """The methods of InferenceService and ModelService."""

    async def infer(request: InferRequest, context: Context) -> InferResponse:
        return await pipeline.infer(request, call_of(context))

    async def infer_batch(request: InferBatchRequest, context: Context) -> InferBatchResponse:
        return await pipeline.infer_batch(request, call_of(context))

    def infer_stream(requests: AsyncIterator[inference_pb2.InferStreamRequest], context: Context) -> AsyncIterator[InferStreamResponse]:
        return pipeline.infer_stream(requests, call_of(context))

    async def list_models(request: models_pb2.ListModelsRequest, context: Context) -> models_pb2.ListModelsResponse:
        return catalog.list_models()

    async def get_model(request: models_pb2.GetModelRequest, context: Context) -> models_pb2.GetModelResponse:
        return catalog.get_model(request)

    return {
        "Infer": infer,
        "InferBatch": infer_batch,
        "InferStream": infer_stream,
        "ListModels": list_models,
        "GetModel": get_model,
    }


async def run(settings: GatewaySettings, telemetry: Telemetry) -> None:
    """Serves until SIGTERM. InferenceService is healthy while all three stages are; the process as a whole always is."""

    @asynccontextmanager
    async def assemble(set_serving: SetServing) -> AsyncIterator[Mapping[str, Method]]:
        bundles = read_repository(settings.repository)
        healthy: set[str] = set()
        complete, ending = asyncio.Event(), asyncio.Event()

        async def report(service: str, is_serving: bool) -> None:
            (healthy.add if is_serving else healthy.discard)(service)
            is_complete = healthy == coalescers.keys()
            await set_serving(INFERENCE_SERVICE.full_name, is_complete)
            if is_complete:
                complete.set()
                log("all stages reached")
            elif not is_serving and not ending.is_set():
                log_warning("stage lost", stage=service)

        coalescers = {
            service: Coalescer(service, partial(report, service), telemetry.meters.counter(Metrics.RETRIED, service))
            for service in ("tokenizer", "neuron-executor", "postprocessor")
        }
        tokenize, execute, postprocess = coalescers.values()
        models = ModelTable({bundle.key: bundle.spec for bundle in bundles})
        async with beside(
            follow_endpoints(TOKENIZE, settings.tokenizer_target, tokenize.serve),
            follow_endpoints(EXECUTE, settings.executor_target, execute.serve),
            follow_endpoints(POSTPROCESS, settings.postprocessor_target, postprocess.serve),
        ):
            with contextlib.suppress(TimeoutError):  # a stage that is down must not keep the others' models from being listed
                await asyncio.wait_for(complete.wait(), _CONNECT_LIMIT_S)
            async with running_result_cache(bundles, settings, telemetry) as results:
                pipeline = Pipeline(models, Stages(tokenize, execute, postprocess), settings, telemetry, results)
                yield gateway_methods(pipeline, Catalog(bundles))
            ending.set()

    await serve(
        "gateway",
        settings,
        [INFERENCE_SERVICE, MODEL_SERVICE],
        assemble,
        follow=[INFERENCE_SERVICE.full_name],
        traces=telemetry.traces,
        stage_targets=[settings.tokenizer_target, settings.executor_target, settings.postprocessor_target],
    )
