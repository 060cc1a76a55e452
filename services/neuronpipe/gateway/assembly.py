"""Assembles the parts of a gateway that all of its doors use, over local or remote stages."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import running_models
from neuronpipe.core.items import Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.results import kept_results, running_result_cache
from neuronpipe.gateway.routing import GatewayModels, open_gateway_models
from neuronpipe.gateway.settings import PipelineSettings, ResultCacheSettings, parse_aliases
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.cache.settings import NO_REDIS, RedisSettings


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts of a gateway that every door gets: one pipeline for all doors, and the served models."""

    pipeline: Pipeline
    catalog: Catalog


@asynccontextmanager
async def running_pipeline(
    stages: Stages,
    settings: PipelineSettings,
    results: ResultCacheSettings,
    telemetry: Telemetry,
    bundles: Sequence[Bundle],
    tenants: Tenants | None = None,
    held_items: HeldItems | None = None,
    redis: RedisSettings = NO_REDIS,
) -> AsyncIterator[tuple[GatewayModels, Pipeline]]:
    """Makes a table without models yet, and the pipeline that runs requests for its models. Raises SetupError.

    `bundles`: the bundles whose models the caller will open. `tenants`: None where callers have no names. `held_items`:
    the held items of the stages.
    """
    keeps_results = kept_results(bundles, results)
    async with AsyncExitStack() as stack:
        cache = None
        if any(map(keeps_results, bundles)):
            cache = await stack.enter_async_context(running_result_cache(results, telemetry, redis))
        models = open_gateway_models(telemetry.meters, keeps_results, parse_aliases(settings.model_aliases))
        await stack.enter_async_context(running_models(models, []))
        pipeline = Pipeline(models, stages, settings, telemetry, results=cache, tenants=tenants, held_items=held_items)
        await stack.enter_async_context(pipeline.copies.running())
        yield models, pipeline
