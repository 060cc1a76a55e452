"""The settings of the whole pipeline in one process."""

from pydantic_settings import SettingsConfigDict

from neuronpipe.gateway.settings import HttpSettings, PipelineSettings, ResultCacheSettings
from neuronpipe.neuron_executor.settings import EngineSettings
from neuronpipe.process.settings import CALLERS_CONNECTION_AGE_S, ServerSettings, connection_age_field, listen_field
from neuronpipe.tokenizer.settings import TokenCacheSettings


class AllSettings(ServerSettings, PipelineSettings, EngineSettings, TokenCacheSettings, ResultCacheSettings, HttpSettings):
    """Settings of the whole pipeline in one process."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ALL_")

    listen: str = listen_field("127.0.0.1:50050")
    max_connection_age_s: float = connection_age_field(CALLERS_CONNECTION_AGE_S)
