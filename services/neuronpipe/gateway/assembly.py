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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The settings of a pipeline, and what it shares with the rest of its process.

    - `tenants`: None where callers have no names.
    - `bundles`: the bundles whose models the caller will open.
    - `held_items`: the held items of the stages.
    """

    settings: PipelineSettings
    results: ResultCacheSettings
    telemetry: Telemetry
    tenants: Tenants | None = None
    bundles: Sequence[Bundle] = ()
    held_items: HeldItems | None = None
    redis: RedisSettings = NO_REDIS


@asynccontextmanager
async def running_pipeline(stages: Stages, setup: PipelineSetup) -> AsyncIterator[tuple[GatewayModels, Pipeline]]:
    """Makes a table without models yet, and the pipeline that runs requests for its models. Raises SetupError."""
    settings, telemetry = setup.settings, setup.telemetry
    keeps_results = kept_results(setup.bundles, setup.results)
    async with AsyncExitStack() as stack:
        cache = None
        if any(map(keeps_results, setup.bundles)):
            cache = await stack.enter_async_context(running_result_cache(setup.results, telemetry, setup.redis))
        models = open_gateway_models(telemetry.meters, keeps_results, parse_aliases(settings.model_aliases))
        await stack.enter_async_context(running_models(models, []))
        pipeline = Pipeline(
            models, stages, settings, telemetry, results=cache, tenants=setup.tenants, held_items=setup.held_items
        )
        await stack.enter_async_context(pipeline.copies.running())
        yield models, pipeline
