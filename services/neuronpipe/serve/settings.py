"""The settings of a process with a gateway and the stages inside it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.addresses import unix_path
from neuronpipe.core.settings import Settings, option_name
from neuronpipe.gateway.settings import NEAR, GatewaySettings
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.platform.process.settings import CALLERS_CONNECTION_AGE_S, ServerSettings
from neuronpipe.stages.settings import EncodingSettings, EngineSettings

# A week.
_LONGEST_IDLE_S = 7 * 86_400


class PipelineProcessSettings(ServerSettings):
    """Settings of the gateway, and of the stages whose target is `local`."""

    prefix: ClassVar[str] = "NEURONPIPE_GATEWAY_"
    defaults: ClassVar[Mapping[str, Any]] = {
        "listen": "127.0.0.1:50050",
        "max_connection_age_s": CALLERS_CONNECTION_AGE_S,
    }
    service: ClassVar[str] = "gateway"

    gateway: GatewaySettings
    executor: EngineSettings
    tokenizer: EncodingSettings
    redis: RedisSettings
    jobs: JobSettings
    idle_exit_s: float = Field(
        0.0,
        ge=0,
        le=_LONGEST_IDLE_S,
        description="seconds without a call after which the process ends, for a supervisor that starts it with the "
        "next connection; 0: never",
    )

    @model_validator(mode="after")
    def _check_stages_are_near(self) -> Self:
        """Refuses a setting of a stage in another process, because it would change nothing here."""
        parts: dict[str, Settings] = {"executor_target": self.executor, "tokenizer_target": self.tokenizer}
        for target, part in parts.items():
            fields = type(part).model_fields.items()
            changed = [name for name, field in fields if getattr(part, name) != field.default]
            if changed and getattr(self.gateway, target) != NEAR:
                raise ValueError(
                    f"{', '.join(map(option_name, changed))}: belongs to a stage in another process; set it there, or "
                    f"run the stage in this process with {option_name(target)} {NEAR}"
                )
        return self


class AllSettings(PipelineProcessSettings):
    """Settings of the whole pipeline in one process."""

    prefix: ClassVar[str] = "NEURONPIPE_ALL_"
    defaults: ClassVar[Mapping[str, Any]] = {
        **PipelineProcessSettings.defaults,
        "tokenizer_target": NEAR,
        "executor_target": NEAR,
        "postprocessor_target": NEAR,
    }
    service: ClassVar[str] = "all"

    front_processes: int = Field(
        0,
        ge=0,
        le=64,
        description="processes with gateway, tokenizer and postprocessor at the same address, before one executor; "
        "0: all in one process",
    )

    @model_validator(mode="after")
    def _check_fronts(self) -> Self:
        if not self.front_processes:
            return self
        if self.gateway.executor_target != NEAR:
            raise ValueError(f"--front-processes: they share the executor of this service, --executor-target {NEAR}")
        if self.idle_exit_s:
            raise ValueError("--idle-exit-s: not with --front-processes, each of which would end by itself")
        if self.gateway.scaler_listen:
            raise ValueError("--scaler-listen: not with --front-processes, whose executor is always there")
        if unix_path(self.process.listen):
            raise ValueError("--front-processes: they share a port, HOST:PORT; a Unix socket belongs to one process")
        return self
