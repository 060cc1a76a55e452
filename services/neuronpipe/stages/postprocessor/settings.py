"""The settings of the postprocessor."""

from pydantic_settings import SettingsConfigDict

from neuronpipe.platform.process.settings import StageSettings, listen_field


class PostprocessorSettings(StageSettings):
    """Settings of the postprocessor."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_POSTPROCESSOR_")

    listen: str = listen_field("127.0.0.1:50053")
