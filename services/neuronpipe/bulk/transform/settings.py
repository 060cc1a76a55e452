"""The settings of `neuronpipe transform` in process."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.stages.neuron_executor.settings import EngineSettings
from neuronpipe.stages.tokenizer.settings import TokenCacheSettings


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
