"""The settings of a process with a gateway and the stages that are near it."""

from typing import ClassVar, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.addresses import unix_path
from neuronpipe.core.settings import option_name
from neuronpipe.gateway.settings import NEAR, GatewaySettings, target_field
from neuronpipe.platform.cache.economics import RedisSettings
from neuronpipe.stages.settings import EncodingSettings, EngineSettings

# A week.
_LONGEST_IDLE_S = 7 * 86_400
_TOKENIZER_SETTINGS = [name for name in EncodingSettings.model_fields if name not in RedisSettings.model_fields]


class PipelineProcessSettings(GatewaySettings, JobSettings, EngineSettings, EncodingSettings):
    """Settings of the gateway, and of the stages whose target is `local`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_GATEWAY_")
    service: ClassVar[str] = "gateway"

    idle_exit_s: float = Field(
        0.0,
        ge=0,
        le=_LONGEST_IDLE_S,
        description="seconds without a call after which the process ends, where a supervisor starts it again with the "
        "next connection; 0: never",
    )

    @model_validator(mode="after")
    def _check_stages_are_near(self) -> Self:
        """A setting of a stage in another process would change nothing here."""
        of_stages = (("executor_target", EngineSettings.model_fields), ("tokenizer_target", _TOKENIZER_SETTINGS))
        for target, names in of_stages:
            changed = [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
            if changed and getattr(self, target) != NEAR:
                raise ValueError(
                    f"{', '.join(map(option_name, changed))}: of a stage in another process; give it to that one, or "
                    f"have the stage in this one by {option_name(target)} {NEAR}"
                )
        return self


class AllSettings(PipelineProcessSettings):
    """Settings of the whole pipeline in one process."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ALL_")
    service: ClassVar[str] = "all"

    tokenizer_target: str = target_field("tokenizer", NEAR)
    executor_target: str = target_field("neuron-executor", NEAR)
    postprocessor_target: str = target_field("postprocessor", NEAR)
    front_processes: int = Field(
        0,
        ge=0,
        le=64,
        description="processes with gateway, tokenizer and postprocessor at the same address, before one executor; "
        "0: all in one process",
    )

    @model_validator(mode="after")
    def _check_fronts(self) -> Self:
        if self.front_processes and self.executor_target != NEAR:
            raise ValueError(f"--front-processes: they share the executor of this service, --executor-target {NEAR}")
        if self.front_processes and self.idle_exit_s:
            raise ValueError("--idle-exit-s: not with --front-processes, each of which would end by itself")
        if self.front_processes and self.scaler_listen:
            raise ValueError("--scaler-listen: not with --front-processes, whose executor is always there")
        if self.front_processes and unix_path(self.listen):
            raise ValueError("--front-processes: they share a port, HOST:PORT; a Unix socket belongs to one process")
        return self
