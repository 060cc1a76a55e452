"""Other values of constants, with which a case is small: for an object, or for a process that a test starts."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import BaseModel

SettingsT = TypeVar("SettingsT", bound=BaseModel)

_FOLDER = Path(__file__).parent / "patched"
# Gives the constants of this process the values that the environment says.
PATCH = _FOLDER / "sitecustomize.py"
_LIMITS = "neuronpipe.platform.process.settings:CallerLimits"
_ENGINE = "neuronpipe.stages.settings:EngineSettings"
# constant → where it is, as MODULE:NAME or MODULE:CLASS.NAME
_PLACES = {
    "batch_limit_s": f"{_ENGINE}.batch_limit_s",
    "fair_window_s": "neuronpipe.gateway.access:_FAIR_WINDOW_S",
    "idle_s": "neuronpipe.stages.neuron_executor.devices:_IDLE_S",
    "look_every_s": "neuronpipe.bundles.folder_repository:LiveRepository.look_every_s",
    "max_connection_age_grace_s": f"{_LIMITS}.max_connection_age_grace_s",
    "max_handshake_s": f"{_LIMITS}.max_handshake_s",
    "max_header_bytes": f"{_LIMITS}.max_header_bytes",
    "max_message_bytes": f"{_LIMITS}.max_message_bytes",
    "max_queue_sequences": f"{_ENGINE}.max_queue_sequences",
    "max_receive_s": f"{_LIMITS}.max_receive_s",
    "max_send_s": f"{_LIMITS}.max_send_s",
    "max_stream_idle_s": "neuronpipe.doors.assembly:_MAX_STREAM_IDLE_S",
    "redis_timeout_ms": "neuronpipe.platform.cache.settings:RedisSettings.redis_timeout_ms",
    "scaler_idle_s": "neuronpipe.doors.scaler:_IDLE_S",
    "step_tokens": f"{_ENGINE}.step_tokens",
}


def with_constants(kind: type[SettingsT], **given: Any) -> SettingsT:
    """Makes settings of a kind. `given`: settings, and constants of the class."""
    constants = {name: given.pop(name) for name in sorted(given.keys() - kind.model_fields.keys())}
    unknown = [name for name in constants if not hasattr(kind, name)]
    assert not unknown, f"{kind.__name__} has no {', '.join(unknown)}"
    made: SettingsT = type(kind.__name__, (kind,), {"__module__": kind.__module__, **constants})(**given)
    return made


def constants(environment: Mapping[str, str] = MappingProxyType({}), /, **values: float) -> dict[str, str]:
    """Returns the environment of a process with other values of these constants.

    `environment`: its other variables. tests/suite/patched/sitecustomize.py sets the constants.
    """
    path = {**os.environ, **environment}.get("PYTHONPATH", "")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(_FOLDER), path]),
        "NEURONPIPE_TESTS_CONSTANTS": json.dumps({_PLACES[name]: value for name, value in values.items()}),
    }


def without_patch(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without the path that `constants` puts before the others."""
    path = variables.get("PYTHONPATH", "").removeprefix(f"{_FOLDER}{os.pathsep}")
    others = {name: value for name, value in variables.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": path} if path else others
