"""Reads settings from the command line and the environment, once, for cli.

A setting `max_batch_size` of the service `neuron-executor` is `--max-batch-size` on the command line, which takes
precedence, or `NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE` in the environment. A variable with the prefix that is not a
setting is an error, because it is most often a typing error. Settings are classes in settings.py of each wing. The end
_s, _ms or _bytes of a name declares the unit: the value is a number of this unit, or has a unit (250ms, 256MiB).

The settings of a service are composed of parts, such as `settings.gateway.pipeline`. Names are unique across
all parts, so users need not know the parts.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from neuronpipe.core.errors import SetupError
from neuronpipe.core.removed_settings import why_removed
from neuronpipe.core.units import in_unit, unit_of

SettingsT = TypeVar("SettingsT", bound="Settings")


class Settings(BaseModel):
    """The base of settings, with the `prefix` of their variables, and own `defaults` for settings of the parts."""

    # Without protected namespaces: some settings begin with "model_".
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    prefix: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @field_validator("*", mode="before")
    @classmethod
    def _take_units(cls, value: object, info: ValidationInfo) -> object:
        unit = unit_of(info.field_name or "")
        return in_unit(value, unit) if unit and isinstance(value, str) and value[-1:].isalpha() else value

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Makes settings with these values, by the names that users know. Raises ValidationError."""
        remaining = {**cls.defaults, **values}
        return cls.model_validate({**_in_parts(cls, remaining), **remaining})


def fields_of(kind: type[Settings]) -> dict[str, FieldInfo]:
    """Returns all settings of a service or command, including the settings of its parts, by name."""
    return {name: field for _, name, field in declared_in(kind)}


def declared_in(kind: type[Settings]) -> Iterator[tuple[type[Settings], str, FieldInfo]]:
    """Yields the class of the part, the name and the field of each setting of a service or command."""
    for name, field in kind.model_fields.items():
        if part := _part_of(field):
            for declaring, own_name, own_field in declared_in(part):
                if own_name in kind.defaults:
                    own_field = copy(own_field)
                    own_field.default = kind.defaults[own_name]
                yield declaring, own_name, own_field
        else:
            yield kind, name, field


def values_of(settings: Settings) -> dict[str, Any]:
    """Returns all values, as JSON can hold them, by the names that users know."""
    values: dict[str, Any] = {}
    for name, value in settings.model_dump(mode="json").items():
        values |= values_of(part) if isinstance(part := getattr(settings, name), Settings) else {name: value}
    return values


def _part_of(field: FieldInfo) -> type[Settings] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _in_parts(kind: type[Settings], values: dict[str, Any]) -> dict[str, Any]:
    """Takes the values of a class's settings out of `values`, and puts the values of each part into a dictionary."""
    in_parts: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if part := _part_of(field):
            in_parts[name] = _in_parts(part, values)
        elif name in values:
            in_parts[name] = values.pop(name)
    return in_parts


def read_settings(kind: type[SettingsT], options: Mapping[str, Any]) -> SettingsT:
    """Reads the settings of a service or command from its options and the environment. Raises SetupError."""
    fields = fields_of(kind)
    fields_by_variable = {variable_name(kind, name): name for name in fields}
    unknown = sorted(name for name in os.environ if name.startswith(kind.prefix) and name not in fields_by_variable)
    removed = [f"{name} {why}" for name in unknown if (why := why_removed(name.removeprefix(kind.prefix)))]
    if removed:
        raise SetupError("; ".join(removed))
    if unknown:
        near = {close: 0 for name in unknown for close in difflib.get_close_matches(name, fields_by_variable)}
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SetupError(f"{', '.join(unknown)}: no such setting; {hint}`--help-all` of the service lists all")
    for field, value in options.items():
        if field.endswith("_url") and has_password(str(value)):
            variable = variable_name(kind, field)
            problem = "holds a password, which other users of this machine see in the list of processes"
            raise SetupError(f"{option_name(field)}: {problem}; set it in the environment, as {variable}")

    def message_of(problem: ErrorDetails) -> str:
        message = problem["msg"].removeprefix("Value error, ")
        name = next((name for name in reversed(problem["loc"]) if name in fields), None)
        if name is None:
            return message
        if problem["type"] == "string_pattern_mismatch":  # people know the form by its description
            message = f"must be of this form: {fields[str(name)].description}"
        written = option_name(str(name)) if name in options else variable_name(kind, str(name))
        return f"{written}: {message}"

    variables = {name.upper(): value for name, value in os.environ.items() if value}
    in_environment = {
        fields_by_variable[name]: value for name, value in variables.items() if name in fields_by_variable
    }
    try:
        return kind.of(**{**in_environment, **options})
    except ValidationError as error:
        raise SetupError("; ".join(sorted(map(message_of, error.errors())))) from error  # options before variables


def read_options(kind: type[SettingsT], options: Mapping[str, Any]) -> SettingsT:
    """Makes settings from the options of a command that have their names; ignores the others. Raises SetupError."""
    fields = fields_of(kind)
    return read_settings(kind, {name: value for name, value in options.items() if name in fields})


def has_password(url: str) -> bool:
    """Returns whether a URL holds a password, in its place or as an option."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return bool(parts.password) or "password" in parse_qs(parts.query)


def variable_name(kind: type[Settings], field: str) -> str:
    return f"{kind.prefix}{field}".upper()


def option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"
