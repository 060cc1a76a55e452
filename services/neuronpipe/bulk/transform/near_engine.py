"""The whole pipeline in this process, for one model."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.batches import BatchMaker, request_id
from neuronpipe.bulk.transform.request import Answer, ModelFacts, Outcome
from neuronpipe.bundles.repository import Bundle, read_trusted_repository
from neuronpipe.bundles.served import running_models
from neuronpipe.bundles.sources import FolderRepository
from neuronpipe.core.background import run_together
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    InternalError,
    InvalidInput,
    ModelNotFound,
    NeuronpipeError,
    SetupError,
    Unavailable,
    WrongTask,
)
from neuronpipe.core.items import Execute, Stages
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelTable
from neuronpipe.core.packed import pack_input
from neuronpipe.gateway.inference import InferenceRequest
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.routing import open_gateway_models
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.stages.neuron_executor.settings import EngineSettings
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.postprocessor.stage import running_postprocessor
from neuronpipe.stages.tokenizer.settings import TokenCacheSettings
from neuronpipe.stages.tokenizer.stage import running_tokenizer


class TransformSettings(EngineSettings, TokenCacheSettings, PipelineSettings):
    """Settings of `neuronpipe transform --repository`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_TRANSFORM_")
    whole_items: ClassVar[bool] = True

    # A batch of MiniLM with 256 to 512 tokens was fastest on CPUs (docs/benchmarks/README.md). Devices want more.
    max_batch_tokens: int = Field(
        512, ge=1, description="padded tokens of a batch of several sequences; not for buckets. More for GPUs, as 16384"
    )
    max_batch_size: int = Field(256, ge=1, le=4096, description="sequences in a batch; not for buckets")
    window_rows: int = Field(
        1024,
        ge=1,
        le=1 << 16,
        description="neighbouring rows of a shard whose sequences are sorted by length and cut into batches",
    )
    # Rows wait for those of their window, and memory is bounded by the windows in flight.
    max_requests_in_flight: int = Field(1 << 20, ge=1, description="as of the gateway; a window's rows must fit in")
    max_tokens_in_flight: int = Field(1 << 40, ge=1, description="as of the gateway")
    max_queue_sequences: int = Field(1 << 20, ge=1, description="as of the neuron-executor")
    max_request_s: float = Field(86_400.0, gt=0, le=86_400, description="as of the gateway")
    # Texts seldom come twice.
    token_cache_bytes: int = Field(0, ge=0, description="as of the tokenizer")
    image_cache_bytes: int = Field(0, ge=0, description="as of the tokenizer")


# A window is computed while the next one is tokenized and the last one written.
_WINDOWS = 3
# Images of a window are in memory as pixels.
_IMAGES = 64
# Errors of a row; all others end the run.
_OF_ROWS = (InvalidInput, WrongTask, InternalError)


class NearEngine:
    """See Engine."""

    windows_in_flight = _WINDOWS

    def __init__(self, bundle: Bundle, pipeline: Pipeline, batches: BatchMaker, settings: TransformSettings) -> None:
        self.model = facts_of(bundle, settings)
        self.window_rows = min(settings.window_rows, _IMAGES) if bundle.spec.image else settings.window_rows
        self._pipeline = pipeline
        self._batches = batches

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[Outcome]:
        """See Engine."""
        window = self._batches.open(len(inputs))
        try:
            return await run_together(self._one(window, row, input) for row, input in enumerate(inputs))
        finally:
            await self._batches.close(window)

    async def _one(self, window: int, row: int, input: TaskInput) -> Outcome:
        call = Call(request_id(window, row), priority=Priority.PRIORITY_BULK)
        request = InferenceRequest(call, self.model.name, self.model.version, pack_input(input))
        try:
            found = await self._pipeline.infer(request)
        except NeuronpipeError as error:
            if isinstance(error, _OF_ROWS):
                return error
            raise
        finally:
            self._batches.leave(window, row)
        usage = found.usage
        return Answer(found.result.message, usage.tokens, usage.truncated_tokens, usage.padded_tokens)


def find_bundle(repository: Path, model: str, version: str = "", trusted_keys: Path | None = None) -> Bundle:
    """A version of a model by its number or alias; without one as the registry says, or the newest.

    `trusted_keys`: see read_trusted_repository. Raises SetupError.
    """
    bundles = {bundle.key: bundle for bundle in read_trusted_repository(repository, trusted_keys)}
    table = ModelTable(bundles, FolderRepository(repository).read_registry().routes)
    try:
        return table.find(model, version)
    except (ModelNotFound, InvalidInput, Unavailable) as error:
        raise SetupError(f"--repository {repository}: {error.message}") from error


def facts_of(bundle: Bundle, settings: TransformSettings) -> ModelFacts:
    """The model, with what its batches follow from."""
    batching = (
        f"{bundle.artifact(settings.backend).backend}: {settings.window_rows} rows, "
        f"{settings.max_batch_size} sequences, {settings.max_batch_tokens} tokens"
    )
    return ModelFacts(bundle.spec.name, str(bundle.spec.version), bundle.digest, bundle.spec.tasks, batching)


@asynccontextmanager
async def running_near_engine(
    bundle: Bundle, settings: TransformSettings, observe: Callable[[Execute], Execute] = lambda execute: execute
) -> AsyncIterator[NearEngine]:
    """The engine, loaded and warmed up. `observe`: put around what computes a batch.

    Raises SetupError for a bundle that cannot run here.
    """
    telemetry = Telemetry()
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(running_executor([bundle], settings, telemetry))
        tokenizer = await stack.enter_async_context(running_tokenizer([bundle], settings, telemetry))
        postprocessor = await stack.enter_async_context(running_postprocessor([bundle]))
        # Results are not cached: of a result that another batch computed the last bits may differ.
        models = open_gateway_models(telemetry.meters, lambda bundle: False)
        await stack.enter_async_context(running_models(models, [bundle]))
        batches = BatchMaker(observe(executor.execute), bundle, settings)
        stages = Stages(tokenizer.tokenize, batches.execute, postprocessor.postprocess)
        yield NearEngine(bundle, Pipeline(models, stages, settings, telemetry), batches, settings)
