"""The settings of `neuronpipe accept`."""

from pydantic_settings import SettingsConfigDict

from neuronpipe.stages.neuron_executor.settings import CoreSettings


class AcceptSettings(CoreSettings):
    """Settings of `neuronpipe accept`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ACCEPT_")
