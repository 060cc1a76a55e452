"""Reads settings from the command line and the environment, once, for cli.

A setting `max_batch_size` of the service `neuron-executor` is `--max-batch-size` on the command line, which takes
precedence, or `NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE` in the environment. A variable with the prefix that is not a
setting is an error, because it is most often a typing error. Settings are classes in settings.py of each wing. A name
that ends with _s, _ms or _bytes declares the unit: the value is a number of it, or has a unit (250ms, 256MiB).
"""

import os
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from neuronpipe.core.errors import SetupError
from neuronpipe.core.units import in_unit, unit_of

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseSettings):
    """The base of all settings."""

    # Set on all base classes: of several values, pydantic takes that of the last class, even a default.
    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True)

    @field_validator("*", mode="before")
    @classmethod
    def _take_units(cls, value: object, info: ValidationInfo) -> object:
        unit = unit_of(info.field_name or "")
        return in_unit(value, unit) if unit and isinstance(value, str) and value[-1:].isalpha() else value


def read_settings(kind: type[SettingsT], given: Mapping[str, Any]) -> SettingsT:
    """Reads the settings of a service or command from its options and the environment. Raises SetupError."""
    prefix = str(kind.model_config.get("env_prefix"))
    known = {variable_name(kind, field) for field in kind.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise SetupError(f"{', '.join(unknown)}: no such setting; there are {', '.join(sorted(known))}")
    for field, value in given.items():
        if field.endswith("_url") and has_password(str(value)):
            variable = variable_name(kind, field)
            problem = "holds a password, which other users of this machine see in the list of processes"
            raise SetupError(f"{option_name(field)}: {problem}; set it in the environment, as {variable}")

    def named(field: str) -> str:
        return option_name(field) if field in given else variable_name(kind, field)

    def told(problem: ErrorDetails) -> str:
        field = "".join(map(str, problem["loc"][:1]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "string_pattern_mismatch":  # people know the form by its description
            message = f"must be of this form: {kind.model_fields[field].description}"
        return f"{named(field)}: {message}" if field else message

    try:
        return kind(**given)
    except ValidationError as error:
        raise SetupError("; ".join(map(told, error.errors()))) from error


def read_options(kind: type[SettingsT], options: Mapping[str, Any]) -> SettingsT:
    """The same of a command that has options of its own besides: those with the names of settings count, if given."""
    return read_settings(kind, {name: value for name, value in options.items() if name in kind.model_fields})


def has_password(url: str) -> bool:
    """Whether a URL holds a password, in its place or as an option."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.password) or "password" in parse_qs(parts.query)


def variable_name(kind: type[Settings], field: str) -> str:
    """The environment variable of a setting."""
    return f"{kind.model_config.get('env_prefix')}{field}".upper()


def option_name(field: str) -> str:
    """The command line option of a setting."""
    return f"--{field.replace('_', '-')}"
